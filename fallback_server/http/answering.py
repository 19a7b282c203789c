"""How answers leave the server: the protocol of all APIs, and OpenAI's completions as streams of chunks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.errors import GONE, ApiError, Problem
from nearfar.fallback_server.http.shapes import ChatShape, CompletionShape, Record, ResponseHead, usage_record
from nearfar.fallback_server.http.streams import DONE, EVENTS, event
from nearfar.remote.chunks import Passed


def ended() -> ApiError:
    """Return the error for a request that was ended from outside."""
    said = "the request was ended at the server before its answer was complete"
    return ApiError(GONE, said, None, "cancelled")


def check_ended(piece: Piece) -> None:
    """Raise ApiError for the last piece of an answer that was ended from outside. For APIs without a word for
    that: their clients would take the answer for a complete one.
    """
    if piece.finish == "abort":
        raise ended()


class ResponseWriter(Protocol):
    """How one kind of response is written: as one record, or as a stream of bytes.

    A shape belongs to one response, and is told of its pieces in order.
    """

    media_type: str

    def model_is(self, model: str) -> None:
        """Take the name of the model that answers, where the request named another (`auto`). Called before
        all other methods.
        """
        ...

    def begin(self, usage: TokenUsage) -> Iterable[bytes]:
        """Yield what a stream begins with, before its first piece."""
        ...

    def piece(self, piece: Piece, usage: TokenUsage) -> Iterable[bytes]:
        """Yield a piece as events, with the tokens so far; nothing if the piece has nothing to say."""
        ...

    def end(self, usage: TokenUsage) -> Seq[bytes]:
        """Return the last events of a stream that came to its end: at least one."""
        ...

    def failed(self, problem: Problem) -> Iterable[bytes]:
        """Yield the last events of a stream that failed after its beginning."""
        ...

    def whole(self, pieces: Seq[Piece], usage: TokenUsage) -> Record:
        """Return all pieces as one response."""
        ...


class CompletionResponse:
    """A chat or text completion: chunks, then the usage if it was asked for, then [DONE].

    Events that an upstream sent are passed on as they are, also its usage.
    """

    media_type = EVENTS

    def __init__(self, shape: ChatShape | CompletionShape, head: ResponseHead) -> None:
        self._shape, self._head = shape, head
        self._begun = self._usage_told = False

    def model_is(self, model: str) -> None:
        """See ResponseWriter."""
        self._head.model = model

    def begin(self, usage: TokenUsage) -> Iterable[bytes]:
        """See ResponseWriter. The first chunk comes with the first piece: an upstream's events have their
        own.
        """
        return ()

    def piece(self, piece: Piece, usage: TokenUsage) -> Iterable[bytes]:
        """See ResponseWriter."""
        if isinstance(piece, Passed):
            self._begun = True
            self._usage_told = self._usage_told or piece.usage_told
            return (piece.data,) if piece.data else ()
        record = self._shape.chunk(piece, usage)
        return (*self._opening(usage, [piece]), *(() if record is None else (event(record),)))

    def end(self, usage: TokenUsage) -> Seq[bytes]:
        """See ResponseWriter."""
        told = self._head.usage and not self._usage_told
        return (*self._opening(usage), *((event(self._shape.final(usage)),) if told else ()), DONE)

    def failed(self, problem: Problem) -> Iterable[bytes]:
        """See ResponseWriter."""
        yield event(problem.body)

    def whole(self, pieces: Seq[Piece], usage: TokenUsage) -> Record:
        """See ResponseWriter."""
        merger = pieces[0].merger if pieces and isinstance(pieces[0], Passed) else None
        if merger is None or not all(
            isinstance(piece, Passed) and piece.merger is merger for piece in pieces
        ):
            return self._shape.whole(pieces, usage)
        return {"usage": usage_record(usage), **merger.record(self._head.model)}

    def _opening(self, usage: TokenUsage, first: Seq[Piece] = ()) -> Iterable[bytes]:
        """Return the first chunks of all answers, once."""
        if self._begun:
            return ()
        self._begun = True
        records = (self._shape.opening(index, usage, first) for index in range(self._shape.choices))
        return [event(record) for record in records if record is not None]
