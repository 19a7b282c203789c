"""Reads server-sent events and whole bodies from servers that may be hostile, within bounds of memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
from httpx_sse import EventSource

EVENT_BYTES = 4 << 20
"""Largest event of a stream in bytes: far more than any token, enough for the log-probabilities of a long
prompt.
"""
DONE = "[DONE]"
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


class TooLongError(ValueError):
    """A body or an event exceeds its limit of bytes."""


async def datas(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Yield the data of a stream's events until [DONE]. Comments, which keep a connection alive, are
    skipped.
    """
    source = EventSource(httpx.Response(200, headers=_HEADERS, stream=_Bounded(raw(response))))
    async for event in source.aiter_sse():
        if event.data.strip() == DONE:
            return
        if event.data:
            yield event.data


async def body(response: httpx.Response, limit: int) -> bytes:
    """Read a whole body. Raises TooLongError beyond `limit` bytes."""
    found = bytearray()
    async for part in raw(response):
        found += part
        if len(found) > limit:
            raise TooLongError(f"a body of more than {limit} bytes")
    return bytes(found)


async def beginning(response: httpx.Response, limit: int, seconds: float) -> str:
    """Read the part of a body that comes within `seconds`, at most `limit` bytes: enough for an error
    message.
    """
    found = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in raw(response):
                found += part
                if len(found) >= limit:
                    break
    except (TimeoutError, httpx.HTTPError, ValueError):
        pass
    return bytes(found[:limit]).decode(errors="replace")


async def raw(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield bytes as they come. Raises ValueError for compressed bodies, which we do not request and which
    may expand to any size.
    """
    coding = response.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ValueError(f"the server sends {coding[:40]!r} though it was asked not to compress")
    async for part in response.aiter_raw():
        yield part


class _Bounded(httpx.AsyncByteStream):
    """The bytes of an event stream. Raises TooLongError where no blank line ends an event for too long."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the bytes."""
        open_, tail = 0, b""
        async for part in self._source:
            seen = tail + part
            end = max(seen.rfind(b"\n\n"), seen.rfind(b"\n\r\n"), seen.rfind(b"\r\r"))
            open_ = len(seen) - end if end >= 0 else open_ + len(part)
            if open_ > EVENT_BYTES:
                raise TooLongError(f"an event of more than {EVENT_BYTES} bytes")
            tail = seen[-2:]
            yield part
