"""What the client of a call was told, for an audit log with text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.fallback_server.engines.forwarding import ForwardedChunk
from nearfar.fallback_server.http.errors import JSON
from nearfar.fallback_server.http.shapes import merged
from nearfar.fallback_server.http.streams import EVENTS


class AuditText:
    """Collects the answers of one call."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[Piece]] = {}
        self._forwarded: list[bytes] = []

    def add(self, piece: Piece) -> None:
        """Add a piece of an answer."""
        self._pieces.setdefault(piece.index, []).append(replace(piece, logprobs=(), offsets=()))

    async def overheard(
        self, parts: AsyncGenerator[ForwardedChunk, None]
    ) -> AsyncGenerator[ForwardedChunk, None]:
        """Yield the parts of a forwarded answer, and keep those that are text."""
        async with aclosing(parts):
            async for part in parts:
                if part.type.startswith((JSON, EVENTS)):
                    self._forwarded.append(part.data)
                yield part

    def fields(self) -> dict[str, Any]:
        """Return the fields of an audit entry: the text of each answer, its reasoning and its tool calls. A
        forwarded answer is one text, as the upstream wrote it.
        """
        if self._forwarded:
            return {"answer": [b"".join(self._forwarded).decode(errors="replace")]}
        said = [self._pieces[index] for index in sorted(self._pieces)]
        reasoning = ["".join(piece.reasoning for piece in pieces) for pieces in said]
        calls = [merged([call for piece in pieces for call in piece.tool_calls]) for pieces in said]
        return {
            "answer": ["".join(piece.text for piece in pieces) for pieces in said],
            "reasoning": reasoning if any(reasoning) else None,
            "tool_calls": calls if any(calls) else None,
        }
