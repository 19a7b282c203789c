"""Turns the events of a token backend into text: detokenizes them, applies stop strings, and splits the
answer into its parts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from nearfar.edge_runtime.engine.requests import Logprob
from nearfar.edge_runtime.openai.answer_text import AnswerText
from nearfar.edge_runtime.openai.answers import merge
from nearfar.edge_runtime.openai.pieces import Piece, PromptTokens, RankedLogprob
from nearfar.edge_runtime.openai.records import TokenLogprob
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.stream import TextStream
from nearfar.edge_runtime.tools.parts import PartReader
from nearfar.fallback_server.backend import BackendEvent
from nearfar.fallback_server.engines.base import TokenUsage


@dataclass(frozen=True)
class PromptEcho:
    """The prompt that an answer repeats. `answer` False: only the prompt is wanted. `logprobs`: how many
    likeliest tokens its log-probabilities have; None: it has none.
    """

    text: str
    tokens: tuple[int, ...]
    answer: bool = True
    logprobs: int | None = None


@dataclass(frozen=True)
class AskedTokens:
    """What a request asks of the tokens of an answer and its prompt. `ids`: the prompt's ids, for an answer
    with token ids. `as_names`: log-probabilities name each token `token_id:N`. Either way log-probabilities
    include the end token's, so that they have an entry for each id.

    `prompt_logprobs`: how many likeliest tokens to give for each token of the prompt.
    """

    ids: tuple[int, ...] | None = None
    as_names: bool = False
    prompt_logprobs: int | None = None

    @property
    def with_end(self) -> bool:
        """Whether log-probabilities include the end token's."""
        return self.as_names or self.ids is not None


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
        asked: AskedTokens,
    ) -> None:
        self.index = index
        self.generated = 0
        self.cached = 0
        self.queued: float | None = None
        self._events = events
        self._codec = codec
        self._text = AnswerText(index, codec, stream, reader)
        self._echo = echo
        self._asked = asked
        self._begins = 0 if echo is None else len(echo.text)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the answer piece by piece; leaving the iteration stops the request."""
        first = True
        try:
            async for event in self._events:
                self.cached = self.cached or event.cached_tokens
                self.queued = event.queued if self.queued is None else self.queued
                made = self._echoed(event, self._echo) if self._echo is not None else self._pieces(event)
                self._echo = None
                if first:
                    made[0] = replace(made[0], prompt=self._prompt(event))
                    first = False
                for piece in made:
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
        if event.token is None:
            return self._text.end(event.finish)
        self.generated += 1
        ends = event.finish == "stop"  # the end token is not part of the text
        logprobs: tuple[TokenLogprob, ...] = ()
        if event.logprob is not None and (self._asked.with_end or not ends):
            logprobs = (self._logprob(Logprob(event.token, event.logprob), event.top),)
        if ends:
            made = self._text.end("stop", logprobs, self._begins)
        else:
            made = self._text.push(event.token, event.finish, logprobs, self._begins)
        return made if self._asked.ids is None else [replace(made[0], ids=(event.token,)), *made[1:]]

    def _prompt(self, event: BackendEvent) -> PromptTokens | None:
        """What the first piece says of the prompt."""
        most = self._asked.prompt_logprobs
        if most is None:
            return None if self._asked.ids is None else PromptTokens(self._asked.ids)
        given = event.prompt_logprobs or ()
        entries = (entry and self._by_id(entry[0], entry[1][:most]) for entry in given)
        return PromptTokens(self._asked.ids, tuple(entries))

    def _by_id(self, own: Logprob, top: Seq[Logprob]) -> dict[int, RankedLogprob]:
        """The likeliest tokens by id, after the token itself, whose rank is known if it is one of them."""
        named = self._text.logprob(own.token, own.logprob, ((other.token, other.logprob) for other in top))
        ranked = enumerate(zip(top, named.top_logprobs, strict=True), 1)
        others = {item.token: RankedLogprob(one.token, one.logprob, rank) for rank, (item, one) in ranked}
        return {own.token: RankedLogprob(named.token, named.logprob, None), **others}

    def _echoed(self, event: BackendEvent, echo: PromptEcho) -> list[Piece]:
        """Return the prompt as a piece, and what the event adds to it. Its first token has no log-probability
        (NaN).
        """
        logprobs = []
        given = (event.prompt_logprobs or ()) if echo.logprobs is not None else ()
        for token, entry in zip(echo.tokens, given, strict=True) if given else ():
            own, top = entry or (Logprob(token, float("nan")), ())
            logprobs.append(self._logprob(own, top[: echo.logprobs]))
        offsets, prompt = [], TextStream(self._codec, ())
        for token in echo.tokens if logprobs else ():
            offsets.append(min(prompt.length, len(echo.text)))
            prompt.push(token)
        made = Piece(self.index, text=echo.text, logprobs=tuple(logprobs), offsets=tuple(offsets))
        return [made, *(self._pieces(event) if echo.answer else [Piece(self.index, finish="length")])]

    def _logprob(self, own: Logprob, top: Seq[Logprob]) -> TokenLogprob:
        made = self._text.logprob(own.token, own.logprob, ((other.token, other.logprob) for other in top))
        if not self._asked.as_names:
            return made
        others = [
            replace(named, token=_name(other.token))
            for named, other in zip(made.top_logprobs, top, strict=True)
        ]
        return replace(made, token=_name(own.token), top_logprobs=others)


def _name(token: int) -> str:
    """A token's name in log-probabilities that name tokens by id, as vLLM writes it."""
    return f"token_id:{token}"


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
