"""The events of one request between the task that makes them and whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from nearfar.errors import NearfarError
from nearfar.fallback_server.backend import TokenEvent


class TaskStream:
    """Events of a request that a task works on. Never holds more than the request's max_tokens."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[TokenEvent | NearfarError] = asyncio.Queue()
        self._ended = False
        self.task: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, NearfarError):
            self._ended = True
            raise event
        self._ended = event.finish is not None
        return event

    def put(self, event: TokenEvent | NearfarError) -> None:
        """Hand an event to who iterates."""
        self._events.put_nowait(event)

    async def cancel(self) -> None:
        """Stop the work."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])

    async def aclose(self) -> None:
        """Who iterated wants no more."""
        self._ended = True
        await self.cancel()
