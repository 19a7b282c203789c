"""One request to a server with OpenAI's interface, and when its answer came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from nearfar.errors import NearfarError
from nearfar.fallback_server.bench.options import BenchOptions


@dataclass(frozen=True)
class Outcome:
    """How a request went. Times are in seconds on one clock; `due` is when it should have been sent.

    `first`: the first piece of the answer. `gaps`: between its pieces. `error`: its kind, None for an answer that ended
    well. Token counts are the server's (`usage`), or None where it tells none; `pieces` then stands for the answer's.
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


class StreamError(Exception):
    """An error event in a stream; `kind` is its type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Client:
    """Sends requests to one server. `ignore_eos` may be turned off when the server is found to refuse it."""

    def __init__(self, url: str, options: BenchOptions) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=options.timeout, limits=limits, follow_redirects=False)
        self._options = options
        self._path = "/chat/completions" if options.api == "chat" else "/completions"
        self.model = options.model or ""
        self.ignore_eos = options.ignore_eos

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """JSON of a GET below /v1."""
        return self._checked(await self._call("GET", path))

    async def whole(self, prompt: str, tokens: int) -> httpx.Response:
        """An answer that is not streamed."""
        return await self._call("POST", self._path, self._body(prompt, tokens))

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return await self._http.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise NearfarError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error

    def _checked(self, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise NearfarError(f"{response.url} answers {response.status_code}: {response.text:.300}")
        try:
            return response.json()
        except ValueError as error:
            raise NearfarError(f"{response.url} answers no JSON: {response.text:.100!r}") from error

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
        sent = time.perf_counter()
        watch = _Watch()
        error, message = None, ""
        try:
            body = {**self._body(ask.prompt, ask.output_tokens), "stream": True, "stream_options": {"include_usage": True}}
            async with self._http.stream("POST", self.url + self._path, json=body) as response:
                if response.status_code != 200:
                    error = f"HTTP {response.status_code}"
                    message = (await response.aread()).decode(errors="replace")[:300]
                else:
                    async for event in _events(response):
                        watch.take(event, time.perf_counter())
                    error = None if watch.finished else "cut"
        except httpx.TimeoutException:
            error = "timeout"
        except httpx.ConnectError as failed:
            error, message = "connect", str(failed)
        except httpx.HTTPError as failed:
            error, message = "cut", str(failed)
        except StreamError as failed:
            error, message = f"stream: {failed.kind}", str(failed)
        except ValueError as failed:
            error, message = "not SSE", str(failed)
        end = time.perf_counter()
        return Outcome(
            due, sent, end, watch.first, watch.last, tuple(watch.gaps), watch.pieces, ask.prompt_tokens,
            ask.output_tokens, watch.usage.get("prompt_tokens"), watch.usage.get("completion_tokens"),
            (watch.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, error, message,
        )  # fmt: skip


class _Watch:
    """What has come of an answer."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []
        self.pieces = 0
        self.finished = False
        self.usage: dict[str, Any] = {}

    def take(self, event: dict[str, Any], now: float) -> None:
        """One event of the stream."""
        if event.get("error"):
            error = event["error"] if isinstance(event["error"], dict) else {"message": event["error"]}
            raise StreamError(str(error.get("type") or error.get("code") or "error"), str(error.get("message", "")))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            done = choice.get("finish_reason") is not None
            delta = choice.get("delta") or choice
            said = any(delta.get(name) for name in ("content", "text", "reasoning_content", "reasoning", "tool_calls"))
            self.finished |= done
            # An answer may end without having said a thing: tokens without a text. Its end is all that can be seen of it.
            if said or (done and self.first is None):
                self._piece(now)

    def _piece(self, now: float) -> None:
        if self.last is not None:
            self.gaps.append(now - self.last)
        self.first = now if self.first is None else self.first
        self.last = now
        self.pieces += 1


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """JSON of server-sent events until [DONE]."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError(f"an event that is no object: {data:.100}")
            yield event
