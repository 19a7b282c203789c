"""The events of requests between what makes them and whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.fallback_server.backend import TokenEvent


class EventStream:
    """Events of a request, for `async for`; never holds more than the request's max_tokens."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[TokenEvent | NearfarError] = asyncio.Queue()
        self._ended = False  # the last event has been handed out

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


class TaskStream(EventStream):
    """Events of a request that a task works on."""

    def __init__(self) -> None:
        super().__init__()
        self.task: asyncio.Task[None] | None = None

    async def cancel(self) -> None:
        """Stop the work."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])

    async def aclose(self) -> None:
        """Who iterated wants no more."""
        self._ended = True
        await self.cancel()


def check_room(waiting: int, max_waiting: int) -> None:
    """OverloadError where as many wait as may."""
    if waiting >= max_waiting:
        raise OverloadError(f"{max_waiting} requests are waiting already; try again later", 2.0)


class TaskStreams:
    """The requests of a backend that are under way, by id, each with a task of its own."""

    def __init__(self) -> None:
        self._streams: dict[str, TaskStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def check_new(self, request_id: str) -> None:
        """RequestError for an id that is under way."""
        if request_id in self._streams:
            raise RequestError(f"a request with the id {request_id!r} is under way already")

    def start(self, request_id: str, work: Callable[[TaskStream], Coroutine[Any, Any, None]]) -> TaskStream:
        """Work on a request; it is under way until its task ends."""
        stream = self._streams[request_id] = TaskStream()
        stream.task = asyncio.get_running_loop().create_task(work(stream))
        stream.task.add_done_callback(lambda _: self._streams.pop(request_id, None))
        return stream

    async def cancel(self, request_id: str) -> None:
        """End a request, if it is under way."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.put(TokenEvent(None, "abort"))
            await stream.cancel()

    async def close(self, drain: float) -> None:
        """Wait at most `drain` seconds for the requests under way, then end them."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        if tasks and drain > 0:
            await asyncio.wait(tasks, timeout=drain)
        for stream in list(self._streams.values()):
            stream.put(EngineError("the server is shutting down"))
            await stream.cancel()
