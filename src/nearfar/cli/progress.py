"""The one place where a wait is shown: on a terminal by a line that changes, elsewhere by plain lines.

All of it goes to stderr. Waits shorter than MOMENT show nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichBar

from nearfar.edge_runtime.progress import Progress
from nearfar.hub import waits, watched
from nearfar.hub.transfer import Fetched

MOMENT = 0.3
"""Seconds before a terminal shows a wait."""
FIRST, EVERY = 0.8, 5.0
"""Seconds of a wait before its first plain line, and the least seconds between two lines."""
LOOK = 0.1
"""Seconds between two checks of a wait."""

Line = Callable[[str], None]


def telling(console: Console) -> Line:
    """A function that prints a line of any length, which a terminal wraps."""
    return lambda line: console.print(line, highlight=False, soft_wrap=True)


def shows(console: Console) -> bool:
    """Whether the console can redraw a line and somebody looks at it: a CI would log every state of it, and
    FORCE_COLOR makes any file a terminal.
    """
    forced = bool(os.environ.get("FORCE_COLOR")) and not console.file.isatty()
    plain = forced or os.environ.get("CI", "").lower() not in ("", "0", "false")
    return console.is_terminal and not console.is_dumb_terminal and not plain


EDGE = 3
"""Columns that bars leave free: otherwise the ^C that a terminal echoes would begin a new line, and the bars
would be drawn a second time below the old ones.
"""


class Bar(RichBar):
    """A bar that does not reach the terminal's edge."""

    def get_renderable(self) -> RenderableType:
        """Draw the bar EDGE columns narrower than its line."""
        return _Narrow(super().get_renderable())


@dataclass(frozen=True)
class _Narrow:
    drawn: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.drawn, options.update_width(max(1, options.max_width - EDGE)))


class Pace:
    """Chooses which plain lines are printed for a wait: the first one soon, then one at intervals, none
    twice. If any was printed, a last one follows at the end, with the time that the wait took.
    """

    def __init__(self, say: Line) -> None:
        self._say = say
        self._said: set[str] = set()
        self._begun = self._due = 0.0

    def begin(self) -> None:
        """Begin a wait."""
        self._begun = time.monotonic()
        self._due = self._begun + FIRST
        self._said.clear()

    def look(self, text: str) -> None:
        """Print what is waited for, if it is time to; if nothing has changed, with the seconds so far."""
        now = time.monotonic()
        if now < self._due:
            return
        if text in self._said:
            text = f"{text}, {now - self._begun:.0f} s"
        if text not in self._said:
            self._said.add(text)
            self._say(f"{text} …")
        self._due = now + EVERY

    def end(self, text: str) -> None:
        """End the wait, with a last line if any was printed."""
        if self._said:
            self._say(f"{text}: {time.monotonic() - self._begun:.1f} s")
            self._said.clear()


class Shown:
    """Shows what somebody waits for: a callback for `Engine.load(progress=…)`, which may be called from any
    thread.
    """

    def __init__(self, console: Console, line: Line | None = None) -> None:
        """`line`: gets the plain lines except the last one, instead of a bar."""
        self._console = console
        self._last = line is None
        self._pace = None if line is None and shows(console) else Pace(line or self._print)
        self._lock = threading.RLock()
        self._text, self._done, self._total = "", 0, 0
        self._thread: threading.Thread | None = None
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def __call__(self, progress: Progress) -> None:
        """See nearfar.edge_runtime.progress.Tell."""
        if progress.over:
            self.end(str(progress))
        else:
            self.show(str(progress), progress.done, progress.total)

    def show(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show a new wait; a `total` of 0 is unknown."""
        with self._lock:
            self._text, self._done, self._total = text, done, total
            if self._thread is None:
                if self._pace is not None:
                    self._pace.begin()
                self._thread = threading.Thread(target=self._watch, name="nearfar-progress", daemon=True)
                self._thread.start()

    def end(self, text: str = "") -> None:
        """End all waits; on return the terminal is as it was before. `text`: the last line of a wait that
        succeeded.
        """
        with self._lock:
            if self._pace is not None and self._thread is not None and self._last and text:
                self._pace.end(text)
            self._text, self._thread = "", None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.end(self._text if kind is None else "")

    def _watch(self) -> None:
        """Show a wait after it has taken long enough, until it is over or another one begins."""
        due = time.monotonic() + MOMENT
        while True:
            time.sleep(LOOK)
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                if self._pace is not None:
                    self._pace.look(self._text)
                elif time.monotonic() >= due:
                    self._draw()

    def _draw(self) -> None:
        if self._bar is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(self._text, total=None)
            self._bar.start()
        self._bar.update(self._task, description=self._text, completed=self._done, total=self._total or None)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


class Bars:
    """Shows work of several stages, such as a build: with one bar for each stage, or with plain lines."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Bar(*columns, console=console) if shows(console) else None
        self._lines = Shown(console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        if self._bars is not None:
            self._bars.start()
        self._before = watched.set(self.fetched)
        return self

    def __exit__(self, *reason: object) -> None:
        watched.reset(self._before)
        if self._bars is not None:
            self._bars.stop()
        self._lines.__exit__(*reason)

    def report(self, stage: str, done: int, total: int) -> None:
        """Report the progress of a stage, in any unit; large numbers are bytes."""
        scale = 1_000_000 if total > 10_000_000 else 1
        label = f"{stage} (MB)" if scale > 1 else stage
        if self._bars is None:
            count = f", {done // scale:,} of {total // scale:,}" if total else ""
            self._lines.show(f"{label}{count}", done, total)
            return
        self._bar(label, label, done // scale, total // scale)

    def fetched(self, progress: Fetched) -> None:
        """Report the progress of a download: a bar for each of its files, with the speed."""
        file, rate = PurePosixPath(progress.file).name, f"{progress.rate / 1e6:,.1f} MB/s"
        done, total = progress.done / 1e6, progress.total / 1e6
        if self._bars is not None:
            self._bar(progress.file, f"downloading {file} (MB, {rate})", int(done), int(total))
            return
        of_all = f"{progress.all_done / 1e6:,.0f} of {progress.all_total / 1e6:,.0f} MB"
        self._lines.show(f"downloading {file}, {done:,.0f} of {total:,.0f} MB; all: {of_all}, {rate}")

    def _bar(self, key: str, label: str, done: int, total: int) -> None:
        assert self._bars is not None
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(label, total=None)
        self._bars.update(self._tasks[key], description=label, completed=done, total=total or None)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a wait without known progress."""
    with Shown(Console(stderr=True)) as shown:
        shown.show(text)
        yield


waits.set(waiting)  # every command that uses the hub imports this module


@contextlib.contextmanager
def importing(what: str) -> Iterator[None]:
    """Show on a terminal that libraries are being imported: a compiler takes 2 s."""
    console = Console(stderr=True)
    with Shown(console) if shows(console) else contextlib.nullcontext() as shown:
        if shown is not None:
            shown.show(f"loading {what}")
        yield


@contextlib.contextmanager
def bytes_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Give a callback for bytes done and all bytes, which shows them and their speed."""
    console = Console(stderr=True)
    if not shows(console):
        with Shown(console) as shown:
            yield lambda done, total: shown.show(
                f"{title}, {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", done, total
            )
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
