"""Compiles kernels behind their user: several at a time, what is wanted before what may be, each once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from nearfar.edge_runtime.executors.cpu.cores import usable_cores
from nearfar.format.manifest import Kernel

MOST_THREADS = 8
"""Drivers take a share of each compilation under locks of their own; more threads wait for those."""

Made = TypeVar("Made")
Content = tuple[str | None, str | None, tuple[str, ...], tuple[int, ...]]


def content(kernel: Kernel) -> Content:
    """What makes two kernels one pipeline: the file's hash (or its name), entry, arguments, workgroup."""
    return kernel.sha256 or kernel.file, kernel.entry, kernel.access, kernel.workgroup


def unfinished(futures: Iterable[Future[Made]]) -> list[Future[Made]]:
    """The futures without a pipeline: those not done, cancelled or failed."""
    return [f for f in futures if not f.done() or f.cancelled() or f.exception() is not None]


class Compiler(Generic[Made]):
    """Turns kernels into pipelines in threads, which end when there is nothing left to do.

    `make` is called in those threads, several at a time; with one name of those kernels whose content is the
    same. `rest` is called in one of them where nothing is left to do.
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
        self._running: set[threading.Thread] = set()
        self._closed = False
        self._fresh = False  # something was made since `rest` was called last

    def begin(self, kernels: Iterable[tuple[str, Kernel]], *, later: bool = False) -> list[Future[Made]]:
        """What becomes of each kernel. `later`: after all that somebody waits for.

        What failed is tried again when it is asked for again: memory may be there by then.
        """
        with self._lock:
            asked = [self._ask(name, kernel, later) for name, kernel in kernels]
            missing = min(self._threads, len(self._wanted) + len(self._later)) - len(self._running)
            for _ in range(missing):
                # Started before anybody can find it: what has not been started cannot be waited for.
                thread = threading.Thread(target=self._work, name="nearfar-compile", daemon=True)
                thread.start()
                self._running.add(thread)
        return asked

    def made(self) -> list[Made]:
        """What has been compiled, each once."""
        with self._lock:
            done = [f for f in self._futures.values() if f.done() and not f.cancelled()]
        return [f.result() for f in done if f.exception() is None]

    def close(self) -> None:
        """Begin nothing more, and wait for what is being compiled: as long as one kernel takes. Then `rest`,
        if something was made since.
        """
        with self._lock:
            self._closed = True
            running = list(self._running)
            for future in self._futures.values():
                future.cancel()
        for thread in running:
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
            self._wanted.append((name, kernel))  # it may wait among the later ones: who comes second skips it
        if self._closed:
            future.cancel()
        return future

    def _work(self) -> None:
        rested = self._rest is None
        while True:
            with self._lock:
                if self._closed or not (self._wanted or self._later):
                    if rested or self._closed or len(self._running) > 1:
                        self._running.discard(threading.current_thread())
                        return
                    found = None
                else:
                    name, kernel = (self._wanted or self._later).popleft()
                    found = self._futures[content(kernel)]
                    if found.done() or found.running():
                        continue
                    found.set_running_or_notify_cancel()
            if found is None:  # and look again: more may have come meanwhile
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
