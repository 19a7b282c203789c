"""Turns the events of a token backend into text: detokenizes them, applies stop strings, and splits the
answer into its parts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing, suppress
from dataclasses import dataclass

from nearfar.edge_runtime.engine.requests import Logprob
from nearfar.edge_runtime.openai.answer_text import AnswerText
from nearfar.edge_runtime.openai.answers import merge
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import TokenLogprob
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.stream import TextStream
from nearfar.edge_runtime.tools.parts import PartReader
from nearfar.fallback_server.backend import BackendEvent
from nearfar.fallback_server.engines.base import TokenUsage


@dataclass(frozen=True)
class PromptEcho:
    """The prompt that an answer repeats. `answer` False: only the prompt is wanted."""

    text: str
    tokens: tuple[int, ...]
    answer: bool = True


class AnswerPieces:
    """One answer: events of the backend in, pieces out."""

    def __init__(
        self,
        index: int,
        events: AsyncIterator[BackendEvent],
        codec: TextCodec,
        stream: TextStream,
        reader: PartReader | None,
        echo: PromptEcho | None,
    ) -> None:
        self.index = index
        self.generated = 0
        self.cached = 0
        self.queued: float | None = None
        self._events = events
        self._codec = codec
        self._text = AnswerText(index, codec, stream, reader)
        self._echo = echo
        self._begins = 0 if echo is None else len(echo.text)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the answer piece by piece; leaving the iteration stops the request."""
        try:
            async for event in self._events:
                self.cached = self.cached or event.cached_tokens
                self.queued = event.queued if self.queued is None else self.queued
                if self._echo is not None:
                    yield self._echoed(event, self._echo)
                    if not self._echo.answer:
                        yield Piece(self.index, finish="length")
                        return
                    self._echo = None
                for piece in self._pieces(event):
                    yield piece
                    if piece.finish is not None:
                        return
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Stop the request."""
        close = getattr(
            self._events, "aclose", None
        )  # generators have `aclose`, but the protocol asks only for an iterator
        if close is not None:
            await close()

    def _pieces(self, event: BackendEvent) -> list[Piece]:
        self.generated += event.token is not None
        if event.token is None or event.finish == "stop":  # the end token is not part of the text
            return self._text.end(event.finish)
        logprobs: tuple[TokenLogprob, ...] = ()
        if event.logprob is not None:
            logprobs = (self._logprob(Logprob(event.token, event.logprob), event.top),)
        return self._text.push(event.token, event.finish, logprobs, self._begins)

    def _echoed(self, event: BackendEvent, echo: PromptEcho) -> Piece:
        """Return the prompt as a piece. Its first token has no log-probability (NaN)."""
        logprobs = []
        given = event.prompt_logprobs or ()
        for token, entry in zip(echo.tokens, given, strict=bool(given)) if given else ():
            logprobs.append(
                self._logprob(*entry) if entry else self._logprob(Logprob(token, float("nan")), ())
            )
        offsets, prompt = [], TextStream(self._codec, ())
        for token in echo.tokens if logprobs else ():
            offsets.append(min(prompt.length, len(echo.text)))
            prompt.push(token)
        return Piece(self.index, text=echo.text, logprobs=tuple(logprobs), offsets=tuple(offsets))

    def _logprob(self, own: Logprob, top: Seq[Logprob]) -> TokenLogprob:
        return self._text.logprob(own.token, own.logprob, ((other.token, other.logprob) for other in top))


@dataclass
class LocalAnswers:
    """All answers of a request. `ended` is called when they are closed. `ignored`: see Answers."""

    choices: list[AnswerPieces]
    prompt_tokens: int
    ended: Callable[[], object]
    ignored: str = ""

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield pieces of all answers as they come."""
        async with aclosing(merge(self.choices)) as pieces:
            async for piece in pieces:
                yield piece

    async def aclose(self) -> None:
        """Cancel the answers that still run; must be called in any case."""
        for choice in self.choices:
            with suppress(Exception):  # the error of a failed answer has been raised already
                await choice.aclose()
        self.ended()

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far; the prompt counts once, however many answers it has."""
        cached = max((choice.cached for choice in self.choices), default=0)
        generated = sum(choice.generated for choice in self.choices)
        queued = min((each.queued for each in self.choices if each.queued is not None), default=None)
        return TokenUsage(self.prompt_tokens, generated, cached, queued)
