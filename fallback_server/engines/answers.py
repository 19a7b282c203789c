"""Answers of a token backend on their way to text: detokenized, stopped, taken apart."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from nearfar.edge_runtime.openai.answers import merge
from nearfar.edge_runtime.openai.records import TokenLogprob, TopLogprob
from nearfar.edge_runtime.text.codec import TextCodec, TextStream
from nearfar.edge_runtime.tools.parts import Part, PartReader
from nearfar.fallback_server.backend import Logprob, TokenEvent
from nearfar.fallback_server.engines.base import FinishReason, Piece, TokenUsage, ToolCall


@dataclass(frozen=True)
class Echo:
    """What comes before an answer that repeats its prompt. `answer` False: nothing but the prompt is
    wanted.
    """

    text: str
    tokens: tuple[int, ...]
    answer: bool = True


class Choice:
    """One answer: events of the backend in, pieces out."""

    def __init__(
        self,
        index: int,
        events: AsyncIterator[TokenEvent],
        codec: TextCodec,
        stream: TextStream,
        reader: PartReader | None,
        echo: Echo | None,
    ) -> None:
        self.index = index
        self.generated = 0
        self.cached = 0
        self._events = events
        self._codec = codec
        self._stream = stream
        self._reader = reader
        self._echo = echo
        self._begins = 0 if echo is None else len(echo.text)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer piece by piece; leaving the iteration stops the request."""
        try:
            async for event in self._events:
                self.cached = self.cached or event.cached_tokens
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
        )  # generators have it; the protocol asks for an iterator only
        if close is not None:
            await close()

    def _pieces(self, event: TokenEvent) -> list[Piece]:
        self.generated += event.token is not None
        finish: FinishReason | None = event.finish
        logprobs: tuple[TokenLogprob, ...] = ()
        offset = self._begins + self._stream.length
        if event.token is None or finish == "stop":  # the end token is not part of the text
            text = self._stream.finish()
        else:
            text = self._stream.push(event.token)
            if event.logprob is not None:
                logprobs = (self._logprob(Logprob(event.token, event.logprob), event.top),)
            if finish is not None and not self._stream.stopped:
                text += self._stream.finish()
        if self._stream.stopped:
            finish = "stop"
        offsets = (offset,) if logprobs else ()
        piece = Piece(
            self.index, logprobs=logprobs, finish=finish, tokens=1, offsets=offsets,
            stopped_by=self._stream.stopped_by,
        )  # fmt: skip
        return self._taken_apart(text, piece)

    def _taken_apart(self, text: str, piece: Piece) -> list[Piece]:
        """With reasoning and calls apart from the text, no two parts of calls in one."""
        reader, finish = self._reader, piece.finish
        if reader is None:
            return [replace(piece, text=text)]
        if finish is None:
            parts = reader.push(text)
        else:
            parts = reader.finish(text, cut=finish == "length")
            finish = "tool_calls" if finish == "stop" and reader.called else finish
        made = [self._of(part) for part in parts or [Part()]]
        made[0] = replace(made[0], logprobs=piece.logprobs, tokens=piece.tokens, offsets=piece.offsets)
        made[-1] = replace(made[-1], finish=finish, stopped_by=piece.stopped_by)
        return made

    def _of(self, part: Part) -> Piece:
        call = part.call
        calls = (ToolCall(call.index, call.id, call.name, call.arguments),) if call else ()
        return Piece(self.index, part.text, part.reasoning, calls)

    def _echoed(self, event: TokenEvent, echo: Echo) -> Piece:
        """The prompt. A token without a predecessor has no log-probability."""
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
        text, data = self._describe(own.token)
        alternatives = [
            TopLogprob(t, other.logprob, raw) for other in top for t, raw in [self._describe(other.token)]
        ]
        return TokenLogprob(text, own.logprob, data, alternatives)

    def _describe(self, token: int) -> tuple[str, list[int]]:
        data = self._codec.token_bytes(token)
        return data.decode(errors="replace"), list(data)


@dataclass
class LocalAnswers:
    """All answers of a request. `ended` is called when they are closed."""

    choices: list[Choice]
    prompt_tokens: int
    ended: Callable[[], object]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces of all answers as they come."""
        async with aclosing(merge(self.choices)) as pieces:
            async for piece in pieces:
                yield piece

    async def aclose(self) -> None:
        """Cancel what is still going; call it in any case."""
        for choice in self.choices:
            with suppress(Exception):  # what failed has been raised already
                await choice.aclose()
        self.ended()

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far; the prompt counts once, however many answers it has."""
        cached = max((choice.cached for choice in self.choices), default=0)
        return TokenUsage(self.prompt_tokens, sum(choice.generated for choice in self.choices), cached)
