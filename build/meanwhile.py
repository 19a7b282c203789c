"""Weights are written by a thread while kernels are compiled by this one: neither needs the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol, TypeVar

from nearfar.interruptible import LOOK

T = TypeVar("T")


class Progress(Protocol):
    """Told how far the build is: `stage` is shown, `total` counts bytes for weights; 0: not known yet."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report `done` of `total`."""
        ...


class Stages:
    """The stages of two threads as one: where the weights' ends, what the other thread does is told again."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._here: tuple[str, int, int] | None = None

    def report(self, stage: str, done: int, total: int) -> None:
        """Progress of the thread that compiles."""
        with self._lock:
            self._here = stage, done, total
            self._progress(stage, done, total)

    def beside(self, stage: str, done: int, total: int) -> None:
        """Progress of the thread that writes weights."""
        with self._lock:
            self._progress(stage, done, total)
            if done >= total and self._here is not None:
                self._progress(*self._here)


@contextmanager
def meanwhile(work: Callable[[threading.Event], T]) -> Iterator[Callable[[], T]]:
    """Do work in a thread beside the block, which is given how to wait for its result (or error).

    The block is left when the thread has ended. Where an error or Ctrl-C leaves it, the event that `work` was
    given is set, and `work` raises Stopped at its next step.
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
