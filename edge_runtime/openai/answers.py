"""One answer on its way: tokens of a generation turned into text, stop strings and log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from nearfar.edge_runtime.engine.generation import Generation
from nearfar.edge_runtime.engine.requests import FinishReason, RequestStats, TokenEvent
from nearfar.edge_runtime.grammars.constraint import GrammarConstraint
from nearfar.edge_runtime.openai.records import TokenLogprob, TopLogprob
from nearfar.edge_runtime.text.codec import TextCodec, TextStream

P = TypeVar("P", covariant=True)


@dataclass(frozen=True)
class Piece:
    """What became certain of an answer. The last piece has a finish reason."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


class Answer:
    """One choice of a response. `context` are the tokens that its text continues."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        codec: TextCodec,
        stops: Seq[str],
        context: Seq[int],
        constraint: GrammarConstraint | None = None,
    ) -> None:
        self.index = index
        self._generation = generation
        self._codec = codec
        self._constraint = constraint
        self._count = 0
        self._stream = TextStream(codec, stops, context)

    @property
    def stats(self) -> RequestStats:
        """The figures so far."""
        return self._generation.stats

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer piece by piece; leaving the iteration stops the request."""
        try:
            async for event in self._generation:
                piece = self._piece(event)
                if piece.text or piece.logprobs or piece.finish_reason:
                    yield piece
                if piece.finish_reason:
                    return
        finally:
            await self._generation.aclose()

    def _piece(self, event: TokenEvent) -> Piece:
        finish = event.finish_reason
        self._count += 1
        if finish != "stop" and self._constraint and self._constraint.complete_at == self._count:
            return Piece(self.index, self._text(event.token, True), self._logprobs(event), "stop")
        if finish == "stop":  # the end token is not part of the text
            return Piece(self.index, self._stream.finish(), (), finish)
        text = self._text(event.token, finish is not None)
        if self._stream.stopped:
            finish = "stop"
        return Piece(self.index, text, self._logprobs(event), finish)

    def _text(self, token: int, last: bool) -> str:
        """What has become certain with a token; with the last one, all."""
        text = self._stream.push(token)
        return text + self._stream.finish() if last and not self._stream.stopped else text

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


class Source(Protocol[P]):
    """What gives out pieces."""

    def pieces(self) -> AsyncGenerator[P, None]:
        """Piece by piece; leaving the iteration stops the request."""
        ...


async def merge(answers: Seq[Source[P]]) -> AsyncGenerator[P, None]:
    """The pieces of several answers as they come."""
    if len(answers) == 1:
        async with aclosing(answers[0].pieces()) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[P | Exception | None] = asyncio.Queue()

    async def pump(answer: Source[P]) -> None:
        try:
            async for piece in answer.pieces():
                queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

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
