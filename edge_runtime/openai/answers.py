"""One running answer: turns the tokens of a generation into text, stop strings and log probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from contextlib import aclosing
from typing import Protocol, TypeVar

from nearfar.edge_runtime.engine.generation import Generation
from nearfar.edge_runtime.engine.requests import RequestStats, TokenEvent
from nearfar.edge_runtime.grammars.constraint import GrammarConstraint
from nearfar.edge_runtime.openai.answer_text import AnswerText
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import FinishReason, TokenLogprob
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.stream import TextStream
from nearfar.edge_runtime.tools.parts import PartReader

P = TypeVar("P", covariant=True)


class AnswerChoice:
    """One choice of a response.

    `context`: the tokens that its text continues. `reader`: splits its text (chat).
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
        self._constraint = constraint
        self._count = 0
        self._text = AnswerText(index, codec, TextStream(codec, stops, context), reader)
        self._echo: str | None = None
        self._alone = False

    def begins_with(self, prompt: str, *, alone: bool) -> None:
        """Begin the answer with the prompt's text; `alone`: return nothing else."""
        self._echo, self._alone = prompt, alone

    @property
    def stats(self) -> RequestStats:
        """The figures of the request so far."""
        return self._generation.stats

    async def aclose(self) -> None:
        """Stop the request, even if its pieces were never requested."""
        await self._generation.aclose()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the answer piece by piece; leaving the iteration stops the request."""
        try:
            if self._echo is not None:
                yield Piece(self.index, self._echo, finish="length" if self._alone else None)
            if self._alone:
                return
            async for event in self._generation:
                for piece in (pieces := self._pieces(event)):
                    if not piece.empty:
                        yield piece
                if pieces[-1].finish:
                    return
        finally:
            await self._generation.aclose()

    def _pieces(self, event: TokenEvent) -> list[Piece]:
        finish: FinishReason | None = event.finish_reason
        self._count += 1
        if self._constraint and event.token in self._constraint.ends:
            finish = "stop"
        if finish == "stop":  # the end token is not part of the text
            return self._text.end(finish)
        if self._constraint and self._constraint.complete_at == self._count:
            finish = "stop"
        return self._text.push(event.token, finish, self._logprobs(event))

    def _logprobs(self, event: TokenEvent) -> tuple[TokenLogprob, ...]:
        if event.logprob is None:
            return ()
        top = ((other.token, other.logprob) for other in event.top_logprobs)
        return (self._text.logprob(event.token, event.logprob, top),)


class PieceSource(Protocol[P]):
    """An object that yields pieces."""

    def pieces(self) -> AsyncGenerator[P, None]:
        """Yield pieces; leaving the iteration stops the request."""
        ...


BEHIND = 64
"""The most pieces that wait for the reader of several answers."""


async def merge(answers: Seq[PieceSource[P]]) -> AsyncGenerator[P, None]:
    """Yield the pieces of several answers as they arrive."""
    if len(answers) == 1:
        async with aclosing(answers[0].pieces()) as pieces:
            async for piece in pieces:
                yield piece
        return
    # The queue is short: for a slow reader, answers wait as tokens, which take less memory than pieces.
    queue: asyncio.Queue[P | Exception | None] = asyncio.Queue(BEHIND)

    async def pump(answer: PieceSource[P]) -> None:
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
