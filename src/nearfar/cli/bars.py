"""Progress bars of what has several stages."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Bars:
    """A progress bar per stage."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, stage: str, done: int, total: int) -> None:
        """How far a stage is, in whatever it counts; large numbers are bytes."""
        scale = 1_000_000 if total > 10_000_000 else 1
        label = f"{stage} (MB)" if scale > 1 else stage
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=max(1, total // scale))
        self._progress.update(self._tasks[label], completed=done // scale)
