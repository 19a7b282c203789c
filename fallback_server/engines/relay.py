"""One request on its way through upstream servers: streamed, retried before its first token, continued after it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx

from nearfar.edge_runtime.types import TokenLogprob, TopLogprob
from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.fallback_server.engines.addresses import Address
from nearfar.fallback_server.engines.base import EngineRequest, FinishReason, Piece, Prepared, TokenUsage, ToolCall

if TYPE_CHECKING:
    from nearfar.fallback_server.engines.upstream import UpstreamEngine

log = logging.getLogger(__name__)

_KEPT_BACK = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options")
"""Fields of a request that are no business of the upstream's."""
_FINISHES: dict[str, FinishReason] = {"length": "length", "tool_calls": "tool_calls", "abort": "abort"}


class UpstreamError(Exception):
    """An upstream server failed: another may do better."""


class Relay:
    """The answers of one request, wherever they are computed."""

    def __init__(self, engine: UpstreamEngine, prepared: Prepared) -> None:
        self._engine = engine
        self._request: EngineRequest = prepared.request
        self._prompt_tokens = prepared.prompt_tokens
        self._seen = 0  # tokens of streams that were cut, and of the one under way
        self._usage: TokenUsage | None = None
        self._text = ""
        self._began = False
        self._finished: set[int] = set()
        self._response: httpx.Response | None = None
        self._end: NearfarError | None = None
        self._aborted = False
        self.on_close: Callable[[], object] = lambda: None

    @property
    def usage(self) -> TokenUsage:
        """As the upstream tells it at its end; before that, what was counted here."""
        return self._usage or TokenUsage(self._prompt_tokens, self._seen)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces of all answers as they come."""
        tried: set[Address] = set()
        failure: Exception | None = None
        while len(tried) < self._engine.options.attempts:
            address = self._engine.book.choose(self._affinity(), tried)
            if address is None:
                break
            tried.add(address)
            try:
                async for piece in self._stream(address):
                    yield piece
                return
            except (UpstreamError, OverloadError) as error:
                log.warning("upstream failed: %s", error)
                failure = error
                if self._end is not None:
                    raise self._end from error
                if self._aborted:
                    yield Piece(0, finish="abort")
                    return
                if self._began and not self._can_continue():
                    raise EngineError(f"the upstream server failed during the answer: {error}") from error
                self._engine.counts.continued += self._began
                self._engine.counts.retries += not self._began
        if isinstance(failure, OverloadError):
            raise failure
        raise EngineError(f"no upstream server can answer now ({failure or 'all circuits are open'}); try again later")

    async def aclose(self) -> None:
        """Leave the upstream; its server sees the disconnect."""
        await self._hang_up()
        self.on_close()

    async def abort(self) -> None:
        """End the answers as they are."""
        self._aborted = True
        await self._hang_up()

    async def fail(self, error: NearfarError) -> None:
        """End the answers with an error."""
        self._end = error
        await self._hang_up()

    async def _hang_up(self) -> None:
        if self._response is not None:
            with suppress(httpx.HTTPError, RuntimeError):
                await self._response.aclose()

    def _affinity(self) -> str:
        from nearfar.fallback_server.engines.upstream import prompt_text

        return prompt_text(self._request)

    def _can_continue(self) -> bool:
        """Whether the emitted text says all that another server must know: one answer of plain text."""
        request = self._request
        plain = not request.tools and request.grammar is None and request.logprobs is None and not request.echo
        return self._engine.options.continues and plain and request.choices == 1 and not self._finished

    def _body(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the call; of a continuation, with the text so far as the beginning of the answer."""
        request = self._request
        body = {name: value for name, value in request.body.items() if name not in _KEPT_BACK}
        body |= {"model": self._engine.remote, "stream": True, "stream_options": {"include_usage": True}}
        if self._began:
            limit = request.max_tokens
            if limit is not None:
                body.pop("max_completion_tokens", None)
                body["max_tokens"] = max(limit - self._seen, 1)
            if request.chat:
                messages = list(body["messages"])
                if request.continue_last:
                    last = messages.pop()
                    messages.append({**last, "content": f"{last['content']}{self._text}"})
                else:
                    messages.append({"role": "assistant", "content": self._text})
                body |= {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
            else:
                body["prompt"] = f"{request.prompts[0]}{self._text}"
        return ("/v1/chat/completions" if request.chat else "/v1/completions"), body

    async def _stream(self, address: Address) -> AsyncGenerator[Piece, None]:
        from nearfar.fallback_server.engines.upstream import checked

        path, body = self._body()
        address.breaker.begin()
        address.under_way += 1
        told = False
        try:
            async with self._engine.client.stream("POST", checked(address, path), json=body) as response:
                self._response = response
                if response.is_error:
                    text = (await response.aread()).decode(errors="replace")
                    raise refusal(response.status_code, text, response.headers)
                async for piece in self._events(response, address):
                    yield piece
            address.breaker.success()
            told = True
        except (RequestError, OverloadError):
            address.breaker.success()  # it works; it only refuses
            told = True
            raise
        except (httpx.HTTPError, httpx.StreamError, UpstreamError, ValueError, LookupError, TypeError) as error:
            if not (self._aborted or self._end):
                address.breaker.failure()
                told = True
            raise UpstreamError(f"{address.url}: {type(error).__name__}: {error}") from error
        finally:
            if not told:
                address.breaker.abandoned()
            address.under_way -= 1
            self._response = None

    async def _events(self, response: httpx.Response, address: Address) -> AsyncGenerator[Piece, None]:
        """The upstream's events as pieces; UpstreamError if the stream ends too early."""
        counts = self._engine.counts
        async for record in self._records(response):
            if "error" in record:
                raise _told(record["error"])
            if record.get("usage"):
                self._take_usage(record["usage"])
            for choice in record.get("choices") or ():
                piece = to_piece(choice, chat=self._request.chat)
                if piece.empty:
                    continue
                if piece.tokens:
                    self._began = True
                    self._seen += piece.tokens
                    counts.generated += piece.tokens
                    self._text += piece.text
                    address.last_token = time.monotonic()
                if piece.finish is not None:
                    self._finished.add(piece.index)
                yield piece
        if len(self._finished) < self._request.choices:
            raise UpstreamError("the stream ended before its answer")

    async def _records(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        lines = response.aiter_lines()
        options = self._engine.options
        timeout = options.first_token_timeout
        while True:
            try:
                async with asyncio.timeout(timeout):
                    line = await anext(lines, None)
            except TimeoutError:
                raise UpstreamError(f"no token for {timeout:g} s") from None
            if line is None or line == "data: [DONE]":
                return
            if line.startswith("data:"):
                timeout = options.between_timeout
                yield json.loads(line[5:])

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        """The upstream's count. Of a continued answer: the first prompt, and all tokens that were sampled."""
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        prompt, completion = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        self._usage = TokenUsage(prompt, max(completion, self._seen), cached)
        self._engine.counts.prompt += prompt
        self._engine.counts.cached += cached


def to_piece(choice: Mapping[str, Any], *, chat: bool) -> Piece:
    """A choice of a streamed chunk."""
    index, finish = int(choice.get("index", 0)), choice.get("finish_reason")
    known: FinishReason | None = None if finish is None else _FINISHES.get(finish, "stop")
    if not chat:
        text = choice.get("text") or ""
        return Piece(index, text, logprobs=_parallel(choice.get("logprobs")), finish=known, tokens=int(bool(text)))
    delta = choice.get("delta") or {}
    text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = tuple(
        ToolCall(call["index"], call.get("id") or "", call["function"].get("name") or "",
                 call["function"].get("arguments") or "")
        for call in delta.get("tool_calls") or ()
    )  # fmt: skip
    logprobs = tuple(_logprob(item) for item in (choice.get("logprobs") or {}).get("content") or ())
    tokens = len(logprobs) or int(bool(text or reasoning or calls))
    return Piece(index, text, reasoning, calls, logprobs, known, tokens)


def _told(error: Any) -> UpstreamError | RequestError:
    """The error of an event. A request that turns out to be wrong is no fault of the server, and wrong everywhere."""
    if isinstance(error, dict) and error.get("type") == "invalid_request_error":
        param = error.get("param")
        return RequestError(str(error.get("message"))[:500], param if isinstance(param, str) else None)
    return UpstreamError(str(error))


def refusal(status: int, text: str, headers: Mapping[str, str]) -> Exception:
    """What an error response means: the request is bad, the server is busy, or the server is broken."""
    try:
        error = json.loads(text)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, param = text[:200] or f"status {status}", None
    if status == 429:
        wait = headers.get("retry-after", "1")
        return OverloadError(message, float(wait) if wait.isdigit() else 1.0)
    if status in (400, 413, 422):
        return RequestError(message, param)
    return UpstreamError(f"status {status}: {message}")


def _logprob(item: Mapping[str, Any]) -> TokenLogprob:
    top = [TopLogprob(o["token"], o["logprob"], o.get("bytes") or []) for o in item.get("top_logprobs") or ()]
    return TokenLogprob(item["token"], item["logprob"], item.get("bytes") or [], top)


def _parallel(logprobs: Mapping[str, Any] | None) -> tuple[TokenLogprob, ...]:
    """OpenAI's older shape: parallel lists."""
    if not logprobs:
        return ()
    out = []
    for at, token in enumerate(logprobs["tokens"]):
        value = logprobs["token_logprobs"][at]
        top = (logprobs.get("top_logprobs") or [None] * (at + 1))[at] or {}
        alternatives = [TopLogprob(text, number, list(text.encode())) for text, number in top.items()]
        out.append(TokenLogprob(token, float("nan") if value is None else value, list(token.encode()), alternatives))
    return tuple(out)
