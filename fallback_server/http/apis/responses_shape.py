"""OpenAI's Responses API: the bytes of an answer, whole or as a stream of named events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.responses.shape import ResponseRecords, TokenCounts
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.errors import Problem
from nearfar.fallback_server.http.shapes import Record
from nearfar.fallback_server.http.streams import EVENTS, event


class ResponseShape:
    """Writes the records of one response as the bytes of its answer."""

    media_type = EVENTS

    def __init__(self, records: ResponseRecords) -> None:
        self._records = records

    def model_is(self, model: str) -> None:
        """See ResponseWriter."""
        self._records.model = model

    def begin(self, usage: TokenUsage) -> Iterable[bytes]:
        """See ResponseWriter."""
        return map(_event, self._records.begin())

    def piece(self, piece: Piece, usage: TokenUsage) -> Iterable[bytes]:
        """See ResponseWriter."""
        return map(_event, self._records.piece(piece))

    def end(self, usage: TokenUsage) -> Sequence[bytes]:
        """See ResponseWriter."""
        return [*map(_event, self._records.end(_counts(usage)))]

    def failed(self, problem: Problem) -> Iterable[bytes]:
        """See ResponseWriter."""
        return map(_event, self._records.failed(problem.code, problem.message, problem.param))

    def whole(self, pieces: Sequence[Piece], usage: TokenUsage) -> Record:
        """See ResponseWriter."""
        return self._records.whole(pieces, _counts(usage))


def _event(record: Record) -> bytes:
    return event(record, record["type"])


def _counts(usage: TokenUsage) -> TokenCounts:
    return TokenCounts(usage.prompt, usage.completion, usage.cached)
