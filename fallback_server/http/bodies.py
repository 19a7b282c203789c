"""Bodies of JSON that are written in the background and sent in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nearfar.edge_runtime.turns import Steps, in_turns
from nearfar.fallback_server.http.writing import written

LARGE = 2048
"""Number of values, or of tokens with their alternatives, from which on a record is written in the
background.
"""
PART_BYTES = 64 << 10
"""Approximate bytes of one part of a body."""


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
