"""The thread that calls the executor: one call at a time, on a device that is reopened after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from nearfar.edge_runtime.engine.scheduler import ScheduledStep
from nearfar.edge_runtime.engine.steps import Done, Launched, Run, Sampled, StepWork, finish, launch
from nearfar.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from nearfar.edge_runtime.cache import Copy
    from nearfar.edge_runtime.executors.base import Executor

T = TypeVar("T")

InFlight = tuple[ScheduledStep, Launched]
Turn = tuple[InFlight | None, list[Done]]
"""The step that is still in flight after a turn of the loop, and the steps that have been read."""

log = logging.getLogger(__name__)


class NoRoom(Exception):
    """Memory did not suffice for steps of `size` rows; `reason` is the executor's error."""

    def __init__(self, size: int, reason: Exception) -> None:
        self.size, self.reason = size, reason


class DeviceThread:
    """Owns the executor and the one thread that calls it.

    Methods are for the event loop; those with an underscore run in the thread. `begin` writes the initial
    contents to a new executor, or to one whose epoch has ended. `reopen` makes another executor after a
    failure; without it, a failed executor can only be closed.
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
        """The error of the executor; set and cleared in the thread."""
        self.pipelined = pipelined
        """Whether a step is queued before the previous one is read."""
        self._begin, self._reopen = begin, reopen
        self._begun = False
        self._copies: deque[Copy] = deque()  # pages to copy before the next call
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nearfar-executor")
        try:
            self._pool.submit(self._ready).result()
        except BaseException:
            self._pool.submit(executor.close)
            self._pool.shutdown()
            raise

    @property
    def reopens(self) -> bool:
        """Whether a failed executor can be replaced."""
        return self._reopen is not None

    async def call(self, call: Callable[[], T], copies: Iterable[Copy]) -> T:
        """Call the executor between two turns, after these pages have been copied."""
        # The copies are queued as a job of their own: they are made, with the next turn, even if the caller
        # no longer waits.
        self._pool.submit(self._copies.extend, copies)

        def ready() -> T:
            self._ready()
            self._copy_pages()
            return call()

        return await self._run(ready)

    async def missing(self, runs: Seq[Run]) -> list[Future[Any]]:
        """Futures of the kernels that still have to be compiled for these runs."""
        return await self._run(partial(self._missing, runs))

    async def turn(self, step: ScheduledStep | None, work: StepWork | None, before: InFlight | None) -> Turn:
        """Queue the next step, then wait for the tokens of the one before."""
        return await self._run(partial(self._turn, step, work, before))

    def end_epoch(self) -> None:
        """Void the contents of the cache: pending copies are dropped, and the executor begins again."""
        self._pool.submit(self._void)

    async def close(self) -> None:
        """Free the device, and end the thread."""
        try:
            await self._run(lambda: self.executor.close())
        finally:
            self._pool.shutdown()

    async def _run(self, call: Callable[[], T]) -> T:
        """Called on the event loop: run a call in the thread and wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _void(self) -> None:
        self._copies.clear()
        self._begun = False

    def _ready(self) -> None:
        """Replace a failed executor, and begin one that has not begun, before other calls."""
        if self.failed is not None and self._reopen is not None:
            # The old executor's memory is freed before the new one's is allocated. Closing a failed executor
            # may fail, too.
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
        """Make the pending page copies. A copy that fails stays pending: the next turn fails again and ends
        the epoch.
        """
        while self._copies:
            self.executor.copy_page(*self._copies[0])
            self._copies.popleft()

    def _missing(self, runs: Seq[Run]) -> list[Future[Any]]:
        self._ready()
        with self._guard():
            return [kernel for run in runs for kernel in self.executor.prepare(*run)]

    def _turn(self, step: ScheduledStep | None, work: StepWork | None, before: InFlight | None) -> Turn:
        self._ready()
        read: list[tuple[ScheduledStep, Launched, Sampled]] = []
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
            # Either of two steps in flight may have used up the memory; the larger one is the one that can be
            # made smaller.
            sizes = [each.size for each in (step, before and before[0]) if each]
            raise NoRoom(max(sizes), error) from error
        # Constraints come last: they must not accept tokens that a device failure would take back.
        return flying, [finish(*done) for done in read]

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Remember that the executor has failed: from then on it can only be closed."""
        try:
            yield
        except Exception as error:
            self.failed = error
            raise
