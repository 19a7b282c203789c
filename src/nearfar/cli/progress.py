"""The one place where a wait is shown: on a terminal by a line that changes, elsewhere by plain lines.

All of it goes to stderr. What takes less than a moment shows nothing.
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
"""Seconds of a wait before a terminal shows it."""
FIRST, EVERY = 0.8, 5.0
"""Seconds of a wait before its first plain line, and at least between two."""
LOOK = 0.1
"""Seconds between two looks at what is waited for."""

Line = Callable[[str], None]


def telling(console: Console) -> Line:
    """Says a line, however long: a terminal breaks it."""
    return lambda line: console.print(line, highlight=False, soft_wrap=True)


def shows(console: Console) -> bool:
    """Whether a line of it can change, and somebody looks: a CI would keep every state of it in its log, and
    FORCE_COLOR makes a terminal of any file.
    """
    forced = bool(os.environ.get("FORCE_COLOR")) and not console.file.isatty()
    plain = forced or os.environ.get("CI", "").lower() not in ("", "0", "false")
    return console.is_terminal and not console.is_dumb_terminal and not plain


EDGE = 3
"""Columns that bars leave free: the ^C that a terminal echoes would else begin a line below, and the bars
would be drawn again under the old.
"""


class Bar(RichBar):
    """Bars that do not reach the terminal's edge."""

    def get_renderable(self) -> RenderableType:
        """What is drawn."""
        return _Narrow(super().get_renderable())


@dataclass(frozen=True)
class _Narrow:
    drawn: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.drawn, options.update_width(max(1, options.max_width - EDGE)))


class Pace:
    """Which plain lines are said of a wait: the first soon, then one now and then, none twice; and where any
    was said, the last when it is over, with the time that it took.
    """

    def __init__(self, say: Line) -> None:
        self._say = say
        self._said: set[str] = set()
        self._begun = self._due = 0.0

    def begin(self) -> None:
        """The wait begins now."""
        self._begun = time.monotonic()
        self._due = self._begun + FIRST
        self._said.clear()

    def look(self, text: str) -> None:
        """Say what is waited for, if it is time to; where nothing has changed, for how long already."""
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
        """It is over."""
        if self._said:
            self._say(f"{text}: {time.monotonic() - self._begun:.1f} s")
            self._said.clear()


class Shown:
    """Shows what somebody waits for: a callback for `Engine.load(progress=…)`, which may be called from any
    thread.
    """

    def __init__(self, console: Console, line: Line | None = None) -> None:
        """`line`: takes plain lines, but for the last, and there is no bar."""
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
        """From now on this is waited for; a `total` of 0 is not known."""
        with self._lock:
            self._text, self._done, self._total = text, done, total
            if self._thread is None:
                if self._pace is not None:
                    self._pace.begin()
                self._thread = threading.Thread(target=self._watch, name="nearfar-progress", daemon=True)
                self._thread.start()

    def end(self, text: str = "") -> None:
        """Nothing is waited for any more; when this returns, the terminal is as it was. `text`: what it came
        to, where it came to its end.
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
        """Show it once it has taken long enough: until the wait is over, or another has begun."""
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
    """What has several stages, such as a build: a bar for each that stays; elsewhere plain lines."""

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
        """How far a stage is, in whatever it counts; large numbers are bytes."""
        scale = 1_000_000 if total > 10_000_000 else 1
        label = f"{stage} (MB)" if scale > 1 else stage
        if self._bars is None:
            count = f", {done // scale:,} of {total // scale:,}" if total else ""
            self._lines.show(f"{label}{count}", done, total)
            return
        self._bar(label, label, done // scale, total // scale)

    def fetched(self, progress: Fetched) -> None:
        """How far a download is: a bar for each of its files, and how fast they come."""
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
    """Shows that something of which nothing else is known takes its time."""
    with Shown(Console(stderr=True)) as shown:
        shown.show(text)
        yield


waits.set(waiting)  # every command that asks the hub imports this module


@contextlib.contextmanager
def importing(what: str) -> Iterator[None]:
    """Shows, where a terminal is looked at, that libraries are loaded: 2 s for a compiler."""
    console = Console(stderr=True)
    with Shown(console) if shows(console) else contextlib.nullcontext() as shown:
        if shown is not None:
            shown.show(f"loading {what}")
        yield


@contextlib.contextmanager
def bytes_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Bytes done and in all, as they are told: what is read or written, and how fast."""
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
