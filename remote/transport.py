"""How connections to servers are made: through aiohttp where it is installed, which parses HTTP in C."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

CLOSING_SECONDS = 1.0
"""The longest wait for the close of connections that were dropped."""


def fast_transport(verify: bool = True) -> httpx.AsyncBaseTransport | None:
    """Return a transport of aiohttp's; None where it is not installed, so that httpx's own is used.

    A front passes on 1.3 times as many events with it (benchmarks/front.py).
    """
    try:
        import aiohttp
        from httpx_aiohttp import AiohttpTransport
    except ModuleNotFoundError:
        return None

    @contextmanager
    def mapped() -> Iterator[None]:
        """Convert aiohttp's errors that httpx-aiohttp leaves: answers that are not HTTP; and connections that
        fail, which httpx-aiohttp 0.2 takes for connections that took too long.
        """
        try:
            yield
        except httpx.ConnectTimeout as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                raise httpx.ConnectError(str(error)) from error.__cause__
            if isinstance(error.__cause__, TimeoutError):
                raise
            raise httpx.ReadError(str(error)) from error.__cause__
        except (aiohttp.ClientError, ValueError) as error:
            raise httpx.RemoteProtocolError(type(error).__name__) from error

    class Stream(httpx.AsyncByteStream):
        def __init__(self, inner: httpx.AsyncByteStream) -> None:
            self._inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            with mapped():
                async for part in self._inner:
                    yield part

        async def aclose(self) -> None:
            with mapped():
                await self._inner.aclose()

    class Transport(AiohttpTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            # httpx has made a header of a name and a password in the address; aiohttp rejects both together
            request.url = request.url.copy_with(userinfo=b"")
            with mapped():
                response = await super().handle_async_request(request)
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = Stream(response.stream)
            return response

    def session() -> Any:
        made = kept()
        assert made is not None
        connector = aiohttp.TCPConnector(limit=0, ssl=made.ssl_context)
        opened = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        weakref.finalize(made, _abandoned, opened, asyncio.get_running_loop())
        return opened

    transport = Transport(verify=verify, client=session)
    kept = weakref.ref(transport)
    return transport


def _abandoned(session: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Close the session of a client that was dropped without close(), if its loop still runs: aiohttp would
    write "Unclosed client session" about it. The garbage collector, or the end of the program, calls this
    function in any thread.
    """
    if session.closed or not loop.is_running():
        return
    closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # in a thread without a loop: wait, because the program may end now
        with suppress(TimeoutError):
            closing.result(CLOSING_SECONDS)
