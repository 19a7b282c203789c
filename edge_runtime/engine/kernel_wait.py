"""Waiting for kernels that requests need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any


class KernelWait:
    """Waits for kernels on the event loop and reports how many are compiled."""

    def __init__(self) -> None:
        self.tell: Callable[[int, int], None] | None = None
        """Called with the compiled kernels and all kernels that requests wait for; at the end of a wait both
        are equal.
        """
        self._awaited: set[Future[Any]] = set()  # kernels of this wait, including those added later

    def expect(self, kernels: Iterable[Future[Any]]) -> None:
        """Count these kernels among the awaited ones from now on."""
        self._awaited.update(kernels)

    async def wait(self, kernels: Sequence[Future[Any]]) -> None:
        """Wait until one of the kernels is compiled; raise the error of one that failed."""
        self.expect(kernels)
        if self.tell is not None:
            self.tell(sum(kernel.done() for kernel in self._awaited), len(self._awaited))
        loop, one_is_done = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed, and then no request waits
                loop.call_soon_threadsafe(one_is_done.set)

        for kernel in kernels:
            kernel.add_done_callback(wake)
        await one_is_done.wait()
        for kernel in kernels:
            if kernel.done():
                kernel.result()

    def end(self) -> None:
        """Report the end of the wait: requests no longer wait for kernels."""
        count = len(self._awaited)
        self._awaited.clear()
        if count and self.tell is not None:
            self.tell(count, count)
