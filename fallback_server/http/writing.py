"""Writes records as JSON in small steps. Long parts of a record are iterators or arrays.

A response with 2,048 vectors of 4,096 numbers is 170 MB of text: writing it at once stopped all other answers
for seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nearfar.edge_runtime.turns import Steps, in_turns

LARGE = 2048
"""Number of values, or of tokens with their alternatives, from which on a record is written in the
background.
"""
NUMBERS = 256
"""Numbers of an array that are written at once."""
PART_BYTES = 64 << 10
"""Approximate bytes of one part of a body."""

Encode = Callable[[Any], str]
SHORT: Encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
SPACED: Encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
"""Encoder with blanks, for lines that people read: events of streams, and the output of commands."""


def written(record: Any, encode: Encode = SHORT) -> Iterator[str]:
    """Yield a record as JSON, in short pieces. Iterators and arrays of numbers become lists."""
    try:
        text = encode(record)
    except TypeError:  # there is an iterator or an array in it, for which the encoder stops
        yield from _long(record, encode)
    else:
        yield text


def _long(record: Any, encode: Encode) -> Iterator[str]:
    before = ""
    if isinstance(record, dict):
        yield "{"
        for name, value in record.items():
            yield f"{before}{encode(name)}:"
            yield from written(value, encode)
            before = ","
        yield "}"
    elif isinstance(record, np.ndarray):
        yield "["
        for start in range(0, len(record), NUMBERS):
            yield before + encode(record[start : start + NUMBERS].tolist())[1:-1]
            before = ","
        yield "]"
    elif isinstance(record, Iterator | list):
        yield "["
        for item in record:
            if before:
                yield before
            yield from written(item, encode)
            before = ","
        yield "]"
    else:
        raise TypeError(f"{type(record).__name__} is not written as JSON")


async def json_response(record: Any, size: int) -> Response:
    """Return a response with a record of about `size` numbers or tokens. A large one is written in the
    background.
    """
    if size < LARGE:
        return JsonBody(["".join(written(record)).encode()])
    return JsonBody(await in_turns(_parts(record)))


def _parts(record: Any) -> Steps[list[bytes]]:
    parts, texts, length = list[bytes](), list[str](), 0
    for text in written(record):
        texts.append(text)
        length += len(text)
        if length >= PART_BYTES:
            parts.append("".join(texts).encode())
            texts, length = [], 0
        yield
    return [*parts, "".join(texts).encode()]


class JsonBody(Response):
    """A JSON body in parts, between which other tasks run."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__()
        self._parts = parts
        self.headers["content-length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
