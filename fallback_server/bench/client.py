"""One request to a server with OpenAI's interface, and when its answer came."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.fallback_server.bench.options import BenchOptions
from nearfar.remote.chunks import Chunk, Usage
from nearfar.remote.errors import RefusedError, RemoteError
from nearfar.remote.server import CHAT, COMPLETIONS, Listed, Server, Waits, client


@dataclass(frozen=True)
class Outcome:
    """How a request went. Times are in seconds on one clock; `due` is when it should have been sent.

    `first`: the first piece of the answer. `gaps`: between its pieces. `error`: its kind, None for an answer
    that ended well. Token counts are the server's (`usage`), or None where it tells none; `pieces` then
    stands for the answer's.
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
        """Time to the first token, from when the request was due: a client that is late hides no waiting."""
        return None if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Mean time between the tokens after the first; None for an answer of one token."""
        if self.first is None or self.last is None or self.output < 2:
            return None
        return (self.last - self.first) / (self.output - 1)

    @property
    def e2e(self) -> float:
        """From when the request was due until its end."""
        return self.end - self.due

    @property
    def output(self) -> int:
        """Tokens of the answer, as well as they are known."""
        return self.pieces if self.output_tokens is None else self.output_tokens


@dataclass(frozen=True)
class Ask:
    """What to send."""

    prompt: str
    prompt_tokens: int
    output_tokens: int


class Client:
    """Sends requests to one server. `ignore_eos` may be turned off when the server is found to refuse it."""

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

    async def models(self) -> tuple[Listed, ...]:
        """What the server lists."""
        return await self._server.models(self._options.timeout)

    async def whole(self, prompt: str, tokens: int) -> Mapping[str, Any]:
        """An answer that is not streamed."""
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
        """Send a request and watch its answer come. Never raises but for cancellation."""
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
"""What went wrong with a stream, beside a status."""


class _Watch:
    """What has come of an answer."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []
        self.pieces = 0
        self.usage: Usage | None = None

    def take(self, chunk: Chunk, now: float) -> None:
        """One event of the stream."""
        self.usage = chunk.usage or self.usage
        for part in chunk.parts:
            said = part.text or part.reasoning or part.tool_calls
            # An answer may end without having said a thing: tokens without a text. Its end is all that can be
            # seen of it.
            if said or (part.finish is not None and self.first is None):
                self._piece(now)

    def _piece(self, now: float) -> None:
        if self.last is not None:
            self.gaps.append(now - self.last)
        self.first = now if self.first is None else self.first
        self.last = now
        self.pieces += 1
