"""Writes weights in a thread while this thread compiles kernels: neither needs the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol, TypeVar

from nearfar.interruptible import LOOK

T = TypeVar("T")


class BuildProgress(Protocol):
    """Callback for the build's progress: `stage` is shown, `total` counts bytes for weights, 0 while it is
    unknown.
    """

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report `done` of `total`."""
        ...


class Stages:
    """Merges the progress of two threads into one line. When the weights are written, the compiler's stage is
    shown again.
    """

    def __init__(self, progress: BuildProgress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._here: tuple[str, int, int] | None = None

    def report(self, stage: str, done: int, total: int) -> None:
        """Take progress of the compiling thread."""
        with self._lock:
            self._here = stage, done, total
            self._progress(stage, done, total)

    def beside(self, stage: str, done: int, total: int) -> None:
        """Take progress of the thread that writes weights."""
        with self._lock:
            self._progress(stage, done, total)
            if done >= total and self._here is not None:
                self._progress(*self._here)


@contextmanager
def meanwhile(work: Callable[[threading.Event], T]) -> Iterator[Callable[[], T]]:
    """Do work in a thread while the block runs; the block gets a function that waits for its result or error.

    Leaving the block waits for the thread to end. Where an error or Ctrl-C ends the block, the event that
    `work` got is set, and `work` raises Stopped at its next step.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1, "nearfar-weights") as pool:
        future = pool.submit(work, stop)
        try:
            yield lambda: _result(future)
        finally:
            stop.set()


def _result(future: Future[T]) -> T:
    while not wait((future,), LOOK).done:
        pass
    return future.result()
