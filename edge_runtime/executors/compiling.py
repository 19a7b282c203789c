"""Compiles kernels in background threads: several at a time, urgent ones first, each kernel once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from nearfar.edge_runtime.executors.cpu.cores import usable_cores
from nearfar.format.manifest import Kernel

MOST_THREADS = 8
"""Drivers hold locks for a part of each compilation; more threads would wait for these locks."""

Made = TypeVar("Made")
Content = tuple[str | None, str | None, tuple[str, ...], tuple[int, ...]]


def content(kernel: Kernel) -> Content:
    """The key by which two kernels share a pipeline: the file's hash (or its name), entry, arguments,
    workgroup.
    """
    return kernel.sha256 or kernel.file, kernel.entry, kernel.access, kernel.workgroup


def unfinished(futures: Iterable[Future[Made]]) -> list[Future[Made]]:
    """The futures without a pipeline: unfinished, cancelled or failed ones."""
    return [f for f in futures if not f.done() or f.cancelled() or f.exception() is not None]


class Compiler(Generic[Made]):
    """Turns kernels into pipelines in threads, which end when there is nothing left to do.

    The threads call `make`, several at a time, once for all kernels with the same content, with the name of
    one of them. One thread calls `rest` when there is nothing left to do.
    """

    def __init__(
        self,
        make: Callable[[str, Kernel], Made],
        threads: int | None = None,
        rest: Callable[[], None] | None = None,
    ) -> None:
        self._make, self._rest = make, rest
        self._threads = threads or min(usable_cores(), MOST_THREADS)
        self._lock = threading.Lock()
        self._futures: dict[Content, Future[Made]] = {}
        self._wanted: deque[tuple[str, Kernel]] = deque()
        self._later: deque[tuple[str, Kernel]] = deque()
        self._working = 0  # threads that take kernels
        self._started: list[threading.Thread] = []  # these, and others that may not have ended
        self._closed = False
        self._fresh = False  # a pipeline was made since `rest` was last called

    def begin(self, kernels: Iterable[tuple[str, Kernel]], *, later: bool = False) -> list[Future[Made]]:
        """Queue kernels and return a future for each. `later`: compile them after those that requests wait
        for.

        A kernel that failed is compiled again at the next request: memory may suffice by then.
        """
        with self._lock:
            asked = [self._ask(name, kernel, later) for name, kernel in kernels]
            missing = min(self._threads, len(self._wanted) + len(self._later)) - self._working
            self._started = [thread for thread in self._started if thread.is_alive()]
            for _ in range(missing):
                # The thread is started before close() can find it: a thread that has not been started cannot
                # be joined.
                thread = threading.Thread(target=self._work, name="nearfar-compile", daemon=True)
                thread.start()
                self._working += 1
                self._started.append(thread)
        return asked

    def made(self) -> list[Made]:
        """The pipelines made so far, each once."""
        with self._lock:
            done = [f for f in self._futures.values() if f.done() and not f.cancelled()]
        return [f.result() for f in done if f.exception() is None]

    def close(self) -> None:
        """Start no more compilations and wait for the running ones, at most as long as one kernel takes.

        Then call `rest` if there are new pipelines since its last call.
        """
        with self._lock:
            self._closed = True
            started = list(self._started)
            for future in self._futures.values():
                future.cancel()
        for thread in started:
            thread.join()
        if self._rest is not None and self._fresh:
            self._fresh = False
            self._rest()

    def _ask(self, name: str, kernel: Kernel, later: bool) -> Future[Made]:
        key = content(kernel)
        future = self._futures.get(key)
        if future is None or (future.done() and (future.cancelled() or future.exception() is not None)):
            future = self._futures[key] = Future()
            (self._later if later else self._wanted).append((name, kernel))
        elif not later and not future.done():
            # a kernel that is wanted later may be in both queues; the second thread skips it
            self._wanted.append((name, kernel))
        if self._closed:
            future.cancel()
        return future

    def _work(self) -> None:
        rested = self._rest is None
        while True:
            with self._lock:
                if self._closed or not (self._wanted or self._later):
                    if rested or self._closed or self._working > 1:
                        self._working -= 1
                        return
                    found = None
                else:
                    name, kernel = (self._wanted or self._later).popleft()
                    found = self._futures[content(kernel)]
                    if found.done() or found.running():
                        continue
                    found.set_running_or_notify_cancel()
            if found is None:  # the thread looks again, because more kernels may have come meanwhile
                assert self._rest is not None
                self._fresh = False
                self._rest()
                rested = True
                continue
            try:
                made = self._make(name, kernel)
                self._fresh = True
                found.set_result(made)
            except BaseException as error:
                found.set_exception(error)
