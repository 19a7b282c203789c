"""The time that a server has for its next token, and a way to end the wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class StoppedError(Exception):
    """Raised in a wait that was ended by `Clock.stop`."""


class Clock:
    """The time left for the next token. Waiting uses it up; comments and empty events do not restore it.

    A wait costs under a microsecond: asyncio.timeout, which makes a timer for each, cost a stream of events
    13 microseconds each.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._given = self._left = seconds
        self._task: asyncio.Task[object] | None = None
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._over: Exception | None = None
        self._stopped = False

    def wind(self, seconds: float) -> None:
        """Restart the time, after a token."""
        self._given = self._left = seconds

    def stop(self) -> None:
        """End the wait under way, and every later one, with StoppedError."""
        self._stopped = True
        if self._task is not None:
            self._end(StoppedError())

    async def wait(self, work: Awaitable[T]) -> T:
        """Return the work's result. Raises TimeoutError when the time is over, and StoppedError."""
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        self._task, self._since, self._over = task, self._loop.time(), None
        self._arm()
        if self._stopped:
            self._end(StoppedError())
        try:
            return await work
        except asyncio.CancelledError:
            over: Exception | None = self._over
            if over is not None and task.uncancel() <= cancelled:
                raise over from None
            raise
        finally:
            self._task = None
            self._left -= self._loop.time() - self._since

    def close(self) -> None:
        """Drop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """Set the timer unless it is set: one that rings too early is set again then."""
        if self._timer is None or self._timer.when() > self._since + self._left:
            self.close()
            self._timer = self._loop.call_at(self._since + self._left, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._loop.time() < self._since + self._left - 1e-6:
            self._arm()
        else:
            self._end(TimeoutError(f"no token for {self._given:g} s"))

    def _end(self, over: Exception) -> None:
        if self._over is None and self._task is not None:
            self._over = over
            self._task.cancel()
