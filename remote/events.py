"""Bytes from a server that may be hostile: server-sent events and whole bodies, never more than their
bound in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
from httpx_sse import EventSource

EVENT_BYTES = 4 << 20
"""Bytes of one event of a stream: far more than any token, enough for the log-probabilities of a long prompt.
"""
DONE = "[DONE]"
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


class TooLongError(ValueError):
    """More bytes than are taken."""


async def datas(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The data of a stream's events until [DONE]. Comments, which keep a connection alive, are passed
    over.
    """
    source = EventSource(httpx.Response(200, headers=_HEADERS, stream=_Bounded(raw(response))))
    async for event in source.aiter_sse():
        if event.data.strip() == DONE:
            return
        if event.data:
            yield event.data


async def body(response: httpx.Response, limit: int) -> bytes:
    """A whole body; TooLongError beyond `limit` bytes."""
    found = bytearray()
    async for part in raw(response):
        found += part
        if len(found) > limit:
            raise TooLongError(f"a body of more than {limit} bytes")
    return bytes(found)


async def beginning(response: httpx.Response, limit: int, seconds: float) -> str:
    """As much of a body as comes in this time, and at most `limit` bytes: enough to say what is wrong."""
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
    """Bytes as they come. Compressed ones, which we do not ask for, may become any number: they are
    refused.
    """
    coding = response.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ValueError(f"the server sends {coding[:40]!r} though it was asked not to compress")
    async for part in response.aiter_raw():
        yield part


class _Bounded(httpx.AsyncByteStream):
    """Bytes of a stream of events; TooLongError where there is no blank line, which ends an event, for too
    long.
    """

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Pass the bytes on."""
        open_, tail = 0, b""
        async for part in self._source:
            seen = tail + part
            end = max(seen.rfind(b"\n\n"), seen.rfind(b"\n\r\n"), seen.rfind(b"\r\r"))
            open_ = len(seen) - end if end >= 0 else open_ + len(part)
            if open_ > EVENT_BYTES:
                raise TooLongError(f"an event of more than {EVENT_BYTES} bytes")
            tail = seen[-2:]
            yield part
