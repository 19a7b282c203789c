"""Messages between a server's processes: a length of four bytes (little-endian), then the message."""

from __future__ import annotations

import asyncio
import struct
from typing import Protocol

_LENGTH = struct.Struct("<I")


class ByteSource(Protocol):
    """A byte stream to read from, as `open(…, "rb")` and `socket.makefile("rb")` give it."""

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes, or fewer at the end."""
        ...


def framed(message: bytes) -> bytes:
    """Return a message with its length in front."""
    return _LENGTH.pack(len(message)) + message


def receive(source: ByteSource) -> bytes | None:
    """Wait for the next message; None when the other side is gone."""
    try:
        head = source.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        message = source.read(length)
    except ConnectionError:
        return None
    return message if len(message) == length else None


async def read(reader: asyncio.StreamReader) -> bytes | None:
    """Read the next message on an event loop; None when the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
