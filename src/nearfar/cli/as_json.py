"""Answers as JSON for `run --json`: the records that the server sends, written by the same code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nearfar.edge_runtime.engine.requests import RequestStats
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import (
    ChatCompletionChunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    Usage,
)
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.shapes import ChatShape, CompletionShape, ResponseHead
from nearfar.fallback_server.http.writing import SPACED, written

Chunk = ChatCompletionChunk | Completion


class JsonAnswer:
    """Takes the chunks of one answer. `usage` and `timings` are known when they have been taken."""

    def __init__(self, chunks: Iterable[Chunk], chat: bool) -> None:
        self._chunks = iter(chunks)
        self._chat = chat
        self._shape: ChatShape | CompletionShape | None = None
        self._usage = TokenUsage(0)
        self.timings: list[RequestStats] | None = None

    def lines(self) -> Iterator[str]:
        """Yield one line for each chunk, as the data of the server's events; the last one has the usage and
        no choices.
        """
        for piece in self._pieces():
            assert self._shape is not None
            made = self._shape.chunk(piece, self._usage) if piece else self._shape.opening(0, self._usage)
            if made is not None:
                yield _line(made)
        if self._shape is not None:
            yield _line(self._shape.final(self._usage))

    def whole(self) -> str:
        """The whole answer as one record in one line."""
        pieces = [piece for piece in self._pieces() if piece]
        assert self._shape is not None
        return _line(self._shape.whole(pieces, self._usage))

    def _pieces(self) -> Iterator[Piece | None]:
        """Yield the content of the chunks, after None for the beginning."""
        for chunk in self._chunks:
            if self._shape is None:
                head = ResponseHead(chunk.id, chunk.model, usage=True, created=chunk.created)
                self._shape = ChatShape(head) if self._chat else CompletionShape(head)
                yield None
            yield from map(_piece, chunk.choices)
            self._usage = _usage(chunk.usage) if chunk.usage else self._usage
            self.timings = chunk.timings or self.timings


def _piece(choice: ChunkChoice | CompletionChoice) -> Piece:
    if isinstance(choice, CompletionChoice):
        return Piece(choice.index, choice.text, finish=choice.finish_reason)
    delta = choice.delta
    return Piece(
        choice.index, delta.content or "", delta.reasoning_content or "", finish=choice.finish_reason
    )


def _usage(usage: Usage) -> TokenUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return TokenUsage(usage.prompt_tokens, usage.completion_tokens, cached)


def _line(record: dict[str, Any]) -> str:
    return "".join(written(record, SPACED)) + "\n"
