"""Streams of a request's events between the engine and the reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Coroutine
from typing import Any

from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.fallback_server.backend import BackendEvent

UNREAD_BYTES = 256 << 20
"""Most unread bytes in all streams of an engine together. Above that, the stream with the most is ended."""
TOO_SLOW = "the client reads too slowly: the unread part of its answer takes too much of the server's memory"


class Unread:
    """Counts the unread bytes in the streams of an engine. Streams whose reader keeps up count nothing."""

    def __init__(self, most: int = UNREAD_BYTES) -> None:
        self.most = most
        self.bytes = 0
        self._streams: set[BackendStream] = set()

    def add(self, stream: BackendStream, count: int) -> None:
        """Change a stream's unread bytes by `count`. Above the limit the stream with the most fails with
        OverloadError.
        """
        self.bytes += count
        stream.unread += count
        if stream.unread:
            self._streams.add(stream)
        else:
            self._streams.discard(stream)
        if self.bytes > self.most:
            max(self._streams, key=lambda each: each.unread).fail(OverloadError(TOO_SLOW, 1.0))


class BackendStream:
    """Events of a request, for `async for`. Unread events are counted in `all_unread` and kept small: a token
    without further data is kept as its id alone.
    """

    def __init__(self, all_unread: Unread) -> None:
        self.unread = 0
        self._all_unread = all_unread
        self._events: deque[BackendEvent | NearfarError | int] = deque()
        self._came: asyncio.Future[None] | None = None
        self._ended = False  # the last event has been handed out, or no reader wants it
        self._closed = False  # no more events are taken

    def __aiter__(self) -> AsyncIterator[BackendEvent]:
        return self

    async def __anext__(self) -> BackendEvent:
        if self._ended:
            raise StopAsyncIteration
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._came = asyncio.get_running_loop().create_future()
            await self._came
        event = self._events.popleft()
        self._all_unread.add(self, -_size(event))
        if isinstance(event, int):
            return BackendEvent(event)
        if isinstance(event, NearfarError):
            self._ended = True
            raise event
        self._ended = event.finish is not None
        return event

    def put(self, event: BackendEvent | NearfarError) -> None:
        """Append an event for the reader."""
        if self._closed:
            return
        kept = _kept(event) if self._events else event
        self._events.append(kept)
        self._wake()
        self._all_unread.add(self, _size(kept))

    def fail(self, error: NearfarError) -> None:
        """End the request: unread events are replaced by the error, and nothing more is computed."""
        self._drop()
        self.put(error)
        self._closed = True

    def leave(self) -> None:
        """Drop unread events: the reader has left."""
        self._ended = self._closed = True
        self._drop()
        self._wake()

    def _drop(self) -> None:
        self._events.clear()
        self._all_unread.add(self, -self.unread)

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)


def _kept(event: BackendEvent | NearfarError) -> BackendEvent | NearfarError | int:
    """The compact form of an unread event: a token without further data becomes its id."""
    if isinstance(event, BackendEvent) and event.token is not None and event == BackendEvent(event.token):
        return event.token
    return event


def _size(event: BackendEvent | NearfarError | int) -> int:
    """Approximate bytes of memory of an event, measured with 20 alternatives and without."""
    if isinstance(event, int):
        return 36
    if isinstance(event, NearfarError):
        return 0
    prompt = event.prompt_logprobs or ()
    return 200 + 150 * len(event.top) + sum(350 + 150 * len(entry[1]) for entry in prompt if entry)


class TaskStream(BackendStream):
    """Events of a request that a task computes."""

    def __init__(self, all_unread: Unread) -> None:
        super().__init__(all_unread)
        self.task: asyncio.Task[None] | None = None

    def fail(self, error: NearfarError) -> None:
        """See BackendStream."""
        super().fail(error)
        if self.task is not None:
            self.task.cancel()

    async def cancel(self) -> None:
        """Stop the work."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])

    async def aclose(self) -> None:
        """End the stream and stop the work."""
        self.leave()
        await self.cancel()


def check_room(waiting: int, max_waiting: int) -> None:
    """Raise OverloadError if `max_waiting` requests wait already."""
    if waiting >= max_waiting:
        raise OverloadError(f"{max_waiting} requests are waiting already; try again later", 2.0)


def check_new(request_id: str, *under_way: Container[str]) -> None:
    """Raise RequestError for an id that is under way."""
    if any(request_id in each for each in under_way):
        raise RequestError(f"a request with the id {request_id!r} is under way already", "id")


class TaskStreams:
    """The requests of a backend that are under way, by id, each with its own task."""

    def __init__(self) -> None:
        self._streams: dict[str, TaskStream] = {}
        self.unread = Unread()

    def __len__(self) -> int:
        return len(self._streams)

    def check_new(self, request_id: str) -> None:
        """Raise RequestError for an id that is under way."""
        check_new(request_id, self._streams)

    def start(self, request_id: str, work: Callable[[TaskStream], Coroutine[Any, Any, None]]) -> TaskStream:
        """Start the work on a request, which is under way until its task ends."""
        stream = self._streams[request_id] = TaskStream(self.unread)
        stream.task = asyncio.get_running_loop().create_task(work(stream))
        stream.task.add_done_callback(lambda _: self._streams.pop(request_id, None))
        return stream

    async def cancel(self, request_id: str) -> None:
        """End a request, if it is under way."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.put(BackendEvent(None, "abort"))
            await stream.cancel()

    async def close(self, drain: float) -> None:
        """Wait at most `drain` seconds for the requests under way, then end them."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        if tasks and drain > 0:
            await asyncio.wait(tasks, timeout=drain)
        for stream in list(self._streams.values()):
            stream.put(EngineError("the server is shutting down"))
            await stream.cancel()
