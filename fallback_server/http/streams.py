"""Server-sent events to clients that may be slow or vanish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nearfar.fallback_server.http.writing import SPACED, written

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
COMMENT = b": nothing yet\n\n"
"""What readers of server-sent events skip. To what lies between (nginx, load balancers) it shows that the
stream lives.
"""


class ClientGoneError(Exception):
    """The client has closed its connection, or was cut off because it reads too slowly."""


def event(record: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + "".join(written(record, SPACED)).encode() + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. ClientGoneError, with the work cancelled, if the client leaves before."""
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
    """Sends events as they come, and a comment where none came for `keep_alive` seconds (0: never).

    In any case, also where nothing can be sent, `events` is closed and `end` called.

    Backpressure is the transport's: while the client's window is full, nothing more is taken from the events.
    How long a client may take nothing is the connection's affair (connections.py).
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], end: Callable[[], Awaitable[None]], keep_alive: float = 0.0
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
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
        """Say something whenever nothing was sent for long. Each `send` is a whole event, so the two never
        mix.
        """
        self._sent = time.monotonic()
        while True:
            while (wait := self._sent + self._keep_alive - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            self._sent = time.monotonic()
