"""The thread that calls the executor: one call after the other, on a device that is opened anew where it has
failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from nearfar.edge_runtime.engine.scheduler import Step
from nearfar.edge_runtime.engine.steps import Done, Launched, Run, Sampled, StepWork, finish, launch
from nearfar.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from nearfar.edge_runtime.cache import Copy
    from nearfar.edge_runtime.executors.base import Executor

T = TypeVar("T")

InFlight = tuple[Step, Launched]
Turn = tuple[InFlight | None, list[Done]]
"""The step that is still in flight after a turn of the loop, and the steps that were read."""

log = logging.getLogger(__name__)


class NoRoom(Exception):
    """There was no memory for steps of so many rows; the reason is what the executor raised."""

    def __init__(self, size: int, reason: Exception) -> None:
        self.size, self.reason = size, reason


class DeviceThread:
    """Owns the executor and the one thread that calls it. Methods are for the event loop; those with an
    underscore run in the thread.

    `begin` gives a new executor, or one whose epoch has ended, what it must hold before the first step.
    `reopen` makes another executor for one that has failed; without it, what has failed can only be closed.
    """

    def __init__(
        self,
        executor: Executor,
        begin: Callable[[Executor], None],
        reopen: Callable[[], Executor] | None,
        pipelined: bool,
    ) -> None:
        self.executor = executor
        self.failed: Exception | None = None
        """What the executor raised; set and cleared in the thread."""
        self.pipelined = pipelined
        """Whether a step is queued before the one before it is read."""
        self._begin, self._reopen = begin, reopen
        self._begun = False
        self._copies: deque[Copy] = deque()  # pages to be copied before whatever comes next
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nearfar-executor")
        try:
            self._pool.submit(self._ready).result()
        except BaseException:
            self._pool.submit(executor.close)
            self._pool.shutdown()
            raise

    @property
    def reopens(self) -> bool:
        """Whether there is another executor after one that has failed."""
        return self._reopen is not None

    async def call(self, call: Callable[[], T], copies: Iterable[Copy]) -> T:
        """Call the executor between two turns, once these pages are copied."""
        # A job of its own: the copies are made, with the next turn, where the caller no longer waits.
        self._pool.submit(self._copies.extend, copies)

        def ready() -> T:
            self._ready()
            self._copy_pages()
            return call()

        return await self._run(ready)

    async def missing(self, runs: Seq[Run]) -> list[Future[Any]]:
        """Kernels that are yet to be compiled for these runs."""
        return await self._run(partial(self._missing, runs))

    async def turn(self, step: Step | None, work: StepWork | None, before: InFlight | None) -> Turn:
        """Queue the next step, then wait for the one before."""
        return await self._run(partial(self._turn, step, work, before))

    def end_epoch(self) -> None:
        """What the cache holds is void: copies that are due are dropped, and the executor begins again."""
        self._pool.submit(self._void)

    async def close(self) -> None:
        """Free the device, and end the thread."""
        try:
            await self._run(lambda: self.executor.close())
        finally:
            self._pool.shutdown()

    async def _run(self, call: Callable[[], T]) -> T:
        """On the event loop: wait for a call in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _void(self) -> None:
        self._copies.clear()
        self._begun = False

    def _ready(self) -> None:
        """Before other calls: a failed executor is replaced, and one that has not begun begins."""
        if self.failed is not None and self._reopen is not None:
            # Memory is given back before it is taken again. What has failed may well fail to close.
            try:
                self.executor.close()
            except Exception as error:
                log.warning("the device that failed could not be closed: %s", error)
            self.executor = self._reopen()
            self.failed, self._begun = None, False
        if not self._begun:
            with self._guard():
                self._begin(self.executor)
            self._begun = True

    def _copy_pages(self) -> None:
        """One that fails stays due: the next turn meets the error again, and ends the epoch."""
        while self._copies:
            self.executor.copy_page(*self._copies[0])
            self._copies.popleft()

    def _missing(self, runs: Seq[Run]) -> list[Future[Any]]:
        self._ready()
        with self._guard():
            return [kernel for run in runs for kernel in self.executor.prepare(*run)]

    def _turn(self, step: Step | None, work: StepWork | None, before: InFlight | None) -> Turn:
        self._ready()
        read: list[tuple[Step, Launched, Sampled]] = []
        try:
            with self._guard():
                self._copy_pages()
                flying = (step, launch(self.executor, work)) if step and work else None
                if before:
                    read.append((*before, before[1].read()))
                if flying and not self.pipelined:
                    read.append((*flying, flying[1].read()))
                    flying = None
        except (OutOfMemory, MemoryError) as error:
            # Of two steps under way either may have taken it: it is the larger one that can be made smaller.
            sizes = [each.size for each in (step, before and before[0]) if each]
            raise NoRoom(max(sizes), error) from error
        # Last, because constraints must not take note of tokens that a failure of the device would take back.
        return flying, [finish(*done) for done in read]

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Remember that the executor has failed: from then on it can only be closed."""
        try:
            yield
        except Exception as error:
            self.failed = error
            raise
