"""Turns the tokens of an answer into pieces, for the engine here and for the engines of a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import FinishReason, TokenLogprob, TopLogprob
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.stream import TextStream
from nearfar.edge_runtime.tools.parts import AnswerPart, PartReader


class AnswerText:
    """Takes the tokens of one answer and returns pieces: detokenized, stopped, and split by the `reader` if
    there is one.
    """

    def __init__(self, index: int, codec: TextCodec, stream: TextStream, reader: PartReader | None) -> None:
        self._index, self._codec, self._stream, self._reader = index, codec, stream, reader

    def push(
        self,
        token: int,
        finish: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] = (),
        before: int = 0,
    ) -> list[Piece]:
        """Take a token of the text; with the last one, `finish`, return all text that was held back.

        `before`: characters of the whole text before this answer's.
        """
        offsets = (before + self._stream.length,) if logprobs else ()
        text = self._stream.push(token)
        if finish is not None and not self._stream.stopped:
            text += self._stream.finish()
        return self._taken_apart(text, Piece(self._index, logprobs=logprobs, finish=finish, offsets=offsets))

    def end(
        self, finish: FinishReason | None, logprobs: tuple[TokenLogprob, ...] = (), before: int = 0
    ) -> list[Piece]:
        """End the answer without a token of its text, for example after its end token, which may have
        log-probabilities. `before`: as in `push`.
        """
        offsets = (before + self._stream.length,) if logprobs else ()
        piece = Piece(self._index, logprobs=logprobs, finish=finish, offsets=offsets)
        return self._taken_apart(self._stream.finish(), piece)

    def logprob(self, token: int, value: float, top: Iterable[tuple[int, float]]) -> TokenLogprob:
        """A token's log probability, and the log probabilities of the likeliest tokens."""
        return TokenLogprob(
            *self._described(token, value), [TopLogprob(*self._described(*one)) for one in top]
        )

    def _described(self, token: int, value: float) -> tuple[str, float, list[int]]:
        data = self._codec.token_bytes(token)
        return data.decode(errors="replace"), value, list(data)

    def _taken_apart(self, text: str, piece: Piece) -> list[Piece]:
        """Split text into pieces of text, reasoning and calls, so that no piece has parts of two calls."""
        reader, finish = self._reader, "stop" if self._stream.stopped else piece.finish
        piece = replace(piece, tokens=1, finish=finish, stopped_by=self._stream.stopped_by)
        if reader is None:
            return [replace(piece, text=text)]
        if finish is None:
            parts = reader.push(text)
        else:
            parts = reader.finish(text, cut=finish == "length")
            finish = "tool_calls" if finish == "stop" and reader.called else finish
        made = [self._of(part) for part in parts or [AnswerPart()]]
        made[0] = replace(made[0], logprobs=piece.logprobs, tokens=piece.tokens, offsets=piece.offsets)
        made[-1] = replace(made[-1], finish=finish, stopped_by=piece.stopped_by)
        return made

    def _of(self, part: AnswerPart) -> Piece:
        return Piece(self._index, part.text, part.reasoning, (part.call,) if part.call else ())
