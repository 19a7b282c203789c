"""One answer on its way: tokens of a generation turned into text, stop strings and log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from nearfar.edge_runtime.engine.generation import Generation
from nearfar.edge_runtime.engine.requests import RequestStats, TokenEvent
from nearfar.edge_runtime.grammars.constraint import GrammarConstraint
from nearfar.edge_runtime.openai.records import (
    FinishReason,
    FunctionDelta,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
)
from nearfar.edge_runtime.text.codec import TextCodec, TextStream
from nearfar.edge_runtime.tools.parts import CallPart, Part, PartReader

P = TypeVar("P", covariant=True)


@dataclass(frozen=True)
class Piece:
    """What became certain of an answer. The last piece has a finish reason."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    offsets: tuple[int, ...] = ()
    """Characters of the whole text before each token of `logprobs`."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.text or self.reasoning or self.tool_calls or self.logprobs or self.finish_reason)


def joined(index: int, pieces: Seq[Piece]) -> Piece:
    """The pieces of an answer as one."""
    return Piece(
        index,
        "".join(piece.text for piece in pieces),
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        pieces[-1].finish_reason if pieces else None,
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
        tuple(offset for piece in pieces for offset in piece.offsets),
    )


class Answer:
    """One choice of a response. `context` are the tokens that its text continues, `reader` takes its text
    apart (chat).
    """

    def __init__(
        self,
        index: int,
        generation: Generation,
        codec: TextCodec,
        stops: Seq[str],
        context: Seq[int],
        constraint: GrammarConstraint | None = None,
        reader: PartReader | None = None,
    ) -> None:
        self.index = index
        self._generation = generation
        self._codec = codec
        self._constraint = constraint
        self._count = 0
        self._stream = TextStream(codec, stops, context)
        self._reader = reader
        self._echo: str | None = None
        self._alone = False

    def begins_with(self, prompt: str, *, alone: bool) -> None:
        """Tell the prompt before the answer; `alone`: instead of it."""
        self._echo, self._alone = prompt, alone

    @property
    def stats(self) -> RequestStats:
        """The figures so far."""
        return self._generation.stats

    async def aclose(self) -> None:
        """Stop the request, whether its pieces were ever asked for or not."""
        await self._generation.aclose()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer piece by piece; leaving the iteration stops the request."""
        try:
            if self._echo is not None:
                yield Piece(self.index, self._echo, finish_reason="length" if self._alone else None)
            if self._alone:
                return
            async for event in self._generation:
                pieces = self._taken_apart(self._piece(event))
                for piece in pieces:
                    if not piece.empty:
                        yield piece
                if pieces[-1].finish_reason:
                    return
        finally:
            await self._generation.aclose()

    def _piece(self, event: TokenEvent) -> Piece:
        finish: FinishReason | None = event.finish_reason
        self._count += 1
        if self._constraint and event.token in self._constraint.ends:
            finish = "stop"
        if finish != "stop" and self._constraint and self._constraint.complete_at == self._count:
            return self._of_token(event, "stop", True)
        if finish == "stop":  # the end token is not part of the text
            return Piece(self.index, self._stream.finish(), (), finish)
        return self._of_token(event, finish, finish is not None)

    def _of_token(self, event: TokenEvent, finish: FinishReason | None, last: bool) -> Piece:
        """The text that has become certain with a token; with the last one, all."""
        logprobs, offset = self._logprobs(event), self._stream.length
        text = self._stream.push(event.token)
        if self._stream.stopped:
            finish = "stop"
        elif last:
            text += self._stream.finish()
        return Piece(self.index, text, logprobs, finish, offsets=(offset,) if logprobs else ())

    def _taken_apart(self, piece: Piece) -> list[Piece]:
        """With reasoning and calls apart from the text, no two parts of calls in one."""
        reader, reason = self._reader, piece.finish_reason
        if reader is None:
            return [piece]
        if reason is None:
            parts = reader.push(piece.text)
        else:
            parts = reader.finish(piece.text, cut=reason == "length")
            reason = "tool_calls" if reason == "stop" and reader.called else reason
        made = [self._of(part) for part in parts or [Part()]]
        made[0] = replace(made[0], logprobs=piece.logprobs, offsets=piece.offsets)
        made[-1] = replace(made[-1], finish_reason=reason)
        return made

    def _of(self, part: Part) -> Piece:
        calls = (_delta(part.call),) if part.call else ()
        return Piece(self.index, part.text, reasoning=part.reasoning, tool_calls=calls)

    def _logprobs(self, event: TokenEvent) -> tuple[TokenLogprob, ...]:
        if event.logprob is None:
            return ()
        text, data = self._describe(event.token)
        top = [TopLogprob(token, other.logprob, raw) for other in event.top_logprobs
               for token, raw in [self._describe(other.token)]]  # fmt: skip
        return (TokenLogprob(text, event.logprob, data, top),)

    def _describe(self, token: int) -> tuple[str, list[int]]:
        data = self._codec.token_bytes(token)
        return data.decode(errors="replace"), list(data)


def _delta(call: CallPart) -> ToolCallDelta:
    function = FunctionDelta(call.name or None, call.arguments)
    return ToolCallDelta(call.index, call.id or None, function, "function" if call.id else None)


class Source(Protocol[P]):
    """What gives out pieces."""

    def pieces(self) -> AsyncGenerator[P, None]:
        """Piece by piece; leaving the iteration stops the request."""
        ...


BEHIND = 64
"""Pieces that wait for the reader of several answers."""


async def merge(answers: Seq[Source[P]]) -> AsyncGenerator[P, None]:
    """The pieces of several answers as they come."""
    if len(answers) == 1:
        async with aclosing(answers[0].pieces()) as pieces:
            async for piece in pieces:
                yield piece
        return
    # The queue is short: for a slow reader, answers wait as tokens, which take less memory than pieces.
    queue: asyncio.Queue[P | Exception | None] = asyncio.Queue(BEHIND)

    async def pump(answer: Source[P]) -> None:
        try:
            async for piece in answer.pieces():
                await queue.put(piece)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(answer)) for answer in answers]
    try:
        going = len(tasks)
        while going:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                going -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
