"""Sends server-sent events to clients that may be slow or vanish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nearfar.fallback_server.http.writing import SPACED, written

T = TypeVar("T")

EVENTS = "text/event-stream"
"""The media type of server-sent events."""
DONE = b"data: [DONE]\n\n"
COMMENT = b": nothing yet\n\n"
"""A comment, which readers of server-sent events skip. It shows proxies (nginx, load balancers) that the
stream lives.
"""


def streaming(media_type: str = EVENTS) -> dict[int | str, dict[str, Any]]:
    """Return what the OpenAPI description of a route says about its streams."""
    return {200: {"content": {media_type: {}}}}


class ClientGoneError(Exception):
    """Raised when the client has closed its connection, or was cut off because it reads too slowly."""


def line(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one line of JSON, without the newline."""
    return "".join(written(dict(record), SPACED)).encode()


def event(record: Mapping[str, Any], name: str = "") -> bytes:
    """Encode one server-sent event. `name`: its type, for APIs that name their events."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + line(record) + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client leaves before, cancel the work and raise ClientGoneError."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client closed its connection")
    finally:
        for pending in (task, gone):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await pending


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come, and a comment after `keep_alive` seconds without one (0: never).

    In any case, also where nothing can be sent, `events` is closed and `end` called. The transport applies
    backpressure: while the client's window is full, no more events are taken. The connection limits how long
    a client may read nothing (connections.py).
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[], Awaitable[None]],
        keep_alive: float = 0.0,
        media_type: str = EVENTS,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._events, self._end, self._keep_alive = events, end, keep_alive
        self._sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            with suppress(ClientGoneError):
                await unless_gone(receive, self._send_all(send))
        finally:
            await self._events.aclose()
            await self._end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        comments = asyncio.create_task(self._comment(send)) if self._keep_alive else None
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._sent = time.monotonic()
        finally:
            if comments is not None:
                comments.cancel()
                await asyncio.wait((comments,))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for `keep_alive` seconds. Each `send` is a whole event, so
        the two never mix.
        """
        self._sent = time.monotonic()
        while True:
            while (wait := self._sent + self._keep_alive - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            self._sent = time.monotonic()
