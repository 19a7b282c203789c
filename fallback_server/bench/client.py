"""Sends one request to a server with OpenAI's interface and records when its answer came."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.fallback_server.bench.options import BenchOptions
from nearfar.remote.chunks import StreamChunk, UsageCounts
from nearfar.remote.errors import RefusedError, RemoteError
from nearfar.remote.server import CHAT, COMPLETIONS, ListedModel, Server, Waits, client


@dataclass(frozen=True)
class Outcome:
    """How a request went. Times are in seconds on one clock; `due` is when it should have been sent.

    `first` is the time of the answer's first piece, `gaps` are the seconds between its pieces. `error` is the
    kind of error, None for an answer that ended well. Token counts come from the server's `usage` and are
    None where it reports none; `pieces` then stands for the answer's tokens.
    """

    due: float
    sent: float
    end: float
    first: float | None = None
    last: float | None = None
    gaps: tuple[float, ...] = ()
    pieces: int = 0
    wanted_prompt: int = 0
    wanted_output: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int = 0
    error: str | None = None
    message: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from the time when the request was due to its first token. A late client thus hides no
        waiting.
        """
        return None if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Mean time between the tokens after the first; None for an answer of one token."""
        if self.first is None or self.last is None or self.output < 2:
            return None
        return (self.last - self.first) / (self.output - 1)

    @property
    def e2e(self) -> float:
        """Seconds from the time when the request was due to its end."""
        return self.end - self.due

    @property
    def output(self) -> int:
        """Tokens of the answer; its pieces where the server reports no count."""
        return self.pieces if self.output_tokens is None else self.output_tokens


@dataclass(frozen=True)
class Ask:
    """A request to send: its prompt, and the wanted lengths in tokens."""

    prompt: str
    prompt_tokens: int
    output_tokens: int


class Client:
    """Sends requests to one server. `ignore_eos` may be turned off when the server rejects it."""

    def __init__(self, url: str, options: BenchOptions) -> None:
        self._http = client(options.key, options.timeout, direct=False)
        self._server = Server(url, self._http, Waits(options.timeout, options.timeout, options.timeout))
        self.url = f"{self._server.root}/v1"
        self._options = options
        self._path = CHAT if options.api == "chat" else COMPLETIONS
        self.model = options.model or ""
        self.ignore_eos = options.ignore_eos

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def models(self) -> tuple[ListedModel, ...]:
        """Return the models that the server lists."""
        return await self._server.models(self._options.timeout)

    async def whole(self, prompt: str, tokens: int) -> Mapping[str, Any]:
        """Return an answer that is not streamed."""
        return await self._server.post(self._path, self._body(prompt, tokens))

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model, "max_tokens": tokens, "temperature": self._options.temperature,
        }  # fmt: skip
        if self._options.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body

    async def stream(self, ask: Ask, due: float) -> Outcome:
        """Send a request and record when its answer comes. Raises nothing but cancellation."""
        sent, watch = time.perf_counter(), _Watch()
        error, message = None, ""
        try:
            async for chunk in self._server.stream(self._path, self._body(ask.prompt, ask.output_tokens)):
                watch.take(chunk, time.perf_counter())
        except RefusedError as refused:
            error, message = f"HTTP {refused.status}", str(refused)
        except RemoteError as failed:
            error, message = _KINDS.get(failed.code, f"HTTP {failed.code}"), str(failed)
        usage = watch.usage
        return Outcome(
            due,
            sent,
            time.perf_counter(),
            watch.first,
            watch.last,
            tuple(watch.gaps),
            watch.pieces,
            ask.prompt_tokens,
            ask.output_tokens,
            usage.prompt if usage else None,
            usage.completion if usage else None,
            usage.cached if usage else 0,
            error,
            message[:300],
        )


_KINDS = {"timeout": "timeout", "connection": "connect", "cut": "cut", "shape": "not SSE", "error": "stream"}
"""Names of the errors of a stream that have no HTTP status, by their code."""


class _Watch:
    """Times and counts of an answer as it comes."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []
        self.pieces = 0
        self.usage: UsageCounts | None = None

    def take(self, chunk: StreamChunk, now: float) -> None:
        """Take in one event of the stream."""
        self.usage = chunk.usage or self.usage
        for part in chunk.parts:
            said = part.text or part.reasoning or part.tool_calls
            # An answer may end without any text, because some tokens have none. Then only its end can be
            # observed.
            if said or (part.finish is not None and self.first is None):
                self._piece(now)

    def _piece(self, now: float) -> None:
        if self.last is not None:
            self.gaps.append(now - self.last)
        self.first = now if self.first is None else self.first
        self.last = now
        self.pieces += 1
