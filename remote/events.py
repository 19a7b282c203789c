"""Reads server-sent events and whole bodies from servers that may be hostile, within bounds of memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator

import httpx

EVENT_BYTES = 4 << 20
"""Largest event of a stream in bytes: far more than any token, enough for the log-probabilities of a long
prompt.
"""
DONE = b"[DONE]"
_BLANK = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
_LINES = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class TooLongError(ValueError):
    """A body or an event exceeds its limit of bytes."""


async def datas(response: httpx.Response) -> AsyncGenerator[list[bytes], None]:
    """Yield the data of a stream's events until [DONE], together those that came together. Comments, which
    keep a connection alive, are skipped. Raises TooLongError for an event that does not end.

    httpx-sse decodes and splits lines one by one, which took a sixth of a front's time.
    """
    pending, first = bytearray(), True
    async for part in raw(response):
        if first:
            part, first = part.removeprefix(_BOM), False
        if (
            _BLANK.search(pending[-3:] + part) is None
        ):  # an event in tiny parts is not searched again and again
            pending += part
            blocks: list[bytes] = []
        else:
            *blocks, rest = _BLANK.split(bytes(pending) + part if pending else part)
            pending = bytearray(rest)
        if len(pending) > EVENT_BYTES or any(len(block) > EVENT_BYTES for block in blocks):
            raise TooLongError(f"an event of more than {EVENT_BYTES} bytes")
        found = [data for block in blocks if (data := _data(block))]
        done = next((at for at, data in enumerate(found) if data.strip() == DONE), None)
        if found[:done]:
            yield found[:done]
        if done is not None:
            return


def _data(block: bytes) -> bytes:
    """Return the data of one event: that of its `data` fields, joined by newlines."""
    if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
        return block[6:]
    values = [
        line[5:].removeprefix(b" ") if line.startswith(b"data:") else b""
        for line in _LINES.split(block)
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(values)


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
