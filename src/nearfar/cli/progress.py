"""The one place where a wait is shown: on a terminal by a line that changes, elsewhere by plain lines.

All of it goes to stderr. What takes less than a moment shows nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
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
from rich.progress import Progress as Bar

from nearfar.edge_runtime.progress import Progress

MOMENT = 0.3
"""Seconds of a wait before a terminal shows it."""
FIRST, EVERY = 1.0, 5.0
"""Seconds of a wait before its first plain line, and between two."""
LOOK = 0.1
"""Seconds between two looks at what is waited for."""

Line = Callable[[str], None]


def shows(console: Console) -> bool:
    """Whether a line of it can change."""
    return console.is_terminal and not console.is_dumb_terminal


class Shown:
    """Shows what somebody waits for: a callback for `Engine.load(progress=…)`, which may be called from any
    thread.
    """

    def __init__(self, console: Console, line: Line | None = None) -> None:
        """`line`: takes plain lines, and there is no bar."""
        self._console = console
        self._line = line or (None if shows(console) else self._print)
        self._lock = threading.RLock()
        self._text, self._done, self._total = "", 0, 0
        self._thread: threading.Thread | None = None
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def __call__(self, progress: Progress) -> None:
        """See nearfar.edge_runtime.progress.Tell."""
        if progress.over:
            self.end()
        else:
            self.show(str(progress), progress.done, progress.total)

    def show(self, text: str, done: int = 0, total: int = 0) -> None:
        """From now on this is waited for; a `total` of 0 is not known."""
        with self._lock:
            self._text, self._done, self._total = text, done, total
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="nearfar-progress", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Nothing is waited for any more; when this returns, the terminal is as it was."""
        with self._lock:
            self._text, self._thread = "", None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _watch(self) -> None:
        """Show it once it has taken long enough: until the wait is over, or another has begun."""
        due = time.monotonic() + (FIRST if self._line is not None else MOMENT)
        while True:
            time.sleep(LOOK)
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                if time.monotonic() < due:
                    continue
                if self._line is not None:
                    self._line(self._text)
                    due = time.monotonic() + EVERY
                else:
                    self._draw()

    def _draw(self) -> None:
        if self._bar is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(self._text, total=None)
            self._bar.start()
        self._bar.update(self._task, description=self._text, completed=self._done, total=self._total or None)

    def _print(self, text: str) -> None:
        self._console.print(f"{text} …", highlight=False, soft_wrap=True, markup=False)


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
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._lines.end()

    def report(self, stage: str, done: int, total: int) -> None:
        """How far a stage is, in whatever it counts; large numbers are bytes."""
        scale = 1_000_000 if total > 10_000_000 else 1
        label = f"{stage} (MB)" if scale > 1 else stage
        if self._bars is None:
            self._lines.show(f"{label}, {done // scale:,} of {total // scale:,}", done, total)
            return
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=max(1, total // scale))
        self._bars.update(self._tasks[label], completed=done // scale)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows that something of which nothing else is known takes its time."""
    with Shown(Console(stderr=True)) as shown:
        shown.show(text)
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
