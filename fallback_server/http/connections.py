"""Protects against clients that are slow on purpose: uvicorn's protocol with a time limit on every wait."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nearfar.fallback_server.http.errors import Problem
from nearfar.fallback_server.http.limits import ServerLimits

ALIVE = ("/health", "/metrics")
"""Paths that are answered at any number of connections: a full server must not be taken for a dead one."""


class BoundedProtocol(H11Protocol):
    """Aborts a connection whose headers do not come, or which reads nothing of what was written, for too
    long.

    A client that reads one byte a second fills its window, the transport stops writing, and the time limit
    runs.
    """

    limits = ServerLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._app, self.app = self.app, self._within_limit

    async def _within_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app while there are not too many connections. uvicorn's own limit answers in plain text,
        and to probes too.
        """
        most = self.limits.connections
        if len(self.connections) <= most or scope["path"] in ALIVE:
            await self._app(scope, receive, send)
            return
        problem = Problem(
            503,
            f"the server has {most} connections, its limit; try again later",
            None,
            "too_many_connections",
            2.0,
        )
        response = problem.response()
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        # Linux would let the buffer grow to megabytes, which the engine fills before a slow reader is
        # noticed.
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer
        )
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        idle = self.cycle is None or self.cycle.response_complete
        if not idle and self._headers is not None:
            self._headers.cancel()
            self._headers = None
        elif idle:  # some bytes of the next request's headers have come
            self._await_headers()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        self._writing = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. Closing waits until all is written, but not for ever."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        for timer in (self._headers, self._writing):
            if timer is not None:
                timer.cancel()

    def _await_headers(self) -> None:
        if self._headers is None:
            self._headers = self.loop.call_later(self.limits.header_timeout, self.transport.abort)


def protocol(limits: ServerLimits) -> type[asyncio.Protocol]:
    """Return the protocol class with these limits; uvicorn makes the instances."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})
