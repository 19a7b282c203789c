"""Relays one request through upstream servers: streams it, retries before its first token, continues after
it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.text.beside import characters
from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.fallback_server.engines.addresses import Address, AddressBook
from nearfar.fallback_server.engines.base import (
    EngineRequest,
    Prepared,
    TokenUsage,
)
from nearfar.remote.chunks import Chunk, Usage
from nearfar.remote.continuing import continued
from nearfar.remote.errors import FewerAnswersError, RefusedError, RemoteError, briefly
from nearfar.remote.server import CHAT, COMPLETIONS

log = logging.getLogger(__name__)

_KEPT_BACK = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "stream_options",
    "cache_salt",
    "request_id",
    "kv_transfer_params",
)
"""Fields that are not forwarded: they do not concern the upstream, or (the last two, vLLM's) are for servers
among themselves.
"""


@dataclass
class Counts:
    """Figures since the start."""

    prompt: int = 0
    generated: int = 0
    cached: int = 0
    retries: int = 0
    continued: int = 0


@dataclass(frozen=True)
class Route:
    """Where a request may go. `model`: its name at the upstream. `continues`: an answer may continue at
    another address. `salts`: the upstream takes `cache_salt`.
    """

    book: AddressBook
    model: str
    attempts: int
    continues: bool
    salts: bool
    counts: Counts


class _Stopped(Exception):
    """Raised to end the answers at once, whatever the upstream still sends."""


class Relay:
    """The answers of one request, wherever they are computed."""

    def __init__(self, route: Route, prepared: Prepared) -> None:
        self._route, self._request = route, prepared.request
        # Affinity decides whose cache knows the prompt: it depends on the tenant's salt and the prompt.
        self._affinity = f"{prepared.request.tenant.salt}{prepared.beginning}"
        self._usage = TokenUsage(prepared.prompt_tokens)
        self._before = 0  # tokens of the streams that were cut
        self._seen = 0  # tokens of the cut streams and of the present one
        self._text = ""
        self._began = self._reasoned = False
        self._chunks: AsyncGenerator[Chunk, None] | None = None
        self._waiting: asyncio.Timeout | None = None
        self._ended_by: NearfarError | None = None
        self._stopped = False
        self.on_close: Callable[[], object] = lambda: None

    @property
    def usage(self) -> TokenUsage:
        """Tokens as the upstream reports them; without a report, as counted here."""
        return TokenUsage(self._usage.prompt, max(self._usage.completion, self._seen), self._usage.cached)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield pieces of all answers as they come."""
        try:
            async with aclosing(self._routed(CHAT if self._request.chat else COMPLETIONS)) as pieces:
                async for piece in pieces:
                    yield piece
        except _Stopped:
            if self._ended_by is not None:
                raise self._ended_by from None
            yield Piece(0, finish="abort")

    async def _routed(self, path: str) -> AsyncGenerator[Piece, None]:
        """Yield pieces from one address after the other, until one has finished the answers. Raises
        EngineError when no address can.
        """
        route, failures = self._route, list[RemoteError]()
        for address in route.book.candidates(self._affinity, path, route.model, route.attempts):
            route.counts.continued += bool(self._seen)
            route.counts.retries += bool(failures) and not self._seen
            answering = False  # whether this address answers, and not only one before it
            try:
                async with aclosing(self._answers(address, path)) as pieces:
                    async for piece in pieces:
                        answering = True
                        yield piece
                return
            except RemoteError as error:
                log.warning("upstream %s failed: %s", address.server.name, briefly(error))
                failures.append(error)
            except RefusedError as error:
                if answering or not self._began:
                    raise
                log.warning(
                    "upstream %s cannot go on with an answer: %s", address.server.name, briefly(error)
                )
                break
            if self._began and not self._can_continue():
                break
            if self._seen >= (self._request.max_tokens or self._seen + 1):
                yield Piece(0, finish="length")  # only the end of the answer was lost
                return
            self._before = self._seen
        if self._began:
            raise EngineError("the upstream server failed during the answer")
        raise unavailable(path, failures)

    async def aclose(self) -> None:
        """Leave the upstream, whose server sees the disconnect."""
        await self._hang_up()
        self.on_close()

    async def abort(self) -> None:
        """End the answers in their present state."""
        await self._hang_up()

    async def fail(self, error: NearfarError) -> None:
        """End the answers with an error."""
        self._ended_by = error
        await self._hang_up()

    async def _hang_up(self) -> None:
        self._stopped = True
        with suppress(RuntimeError):  # the generator is just ending
            if self._waiting is not None:
                self._waiting.reschedule(asyncio.get_running_loop().time())
            elif self._chunks is not None:
                await self._chunks.aclose()

    def _can_continue(self) -> bool:
        """Whether the text so far is all that another server must know: a single plain-text answer without
        reasoning.
        """
        request = self._request
        plain = (
            not request.tools and request.grammar is None and request.logprobs is None and not request.echo
        )
        text = request.chat or isinstance(request.prompts[0], str)
        return self._route.continues and plain and text and request.choices == 1 and not self._reasoned

    def _body(self, only: int | None) -> dict[str, Any]:
        body = upstream_body(self._request, self._route.model, salted=self._route.salts)
        if only is not None:
            return one_answer(body, self._request, only)
        return continued(body, self._text, self._seen) if self._seen else body

    async def _answers(self, address: Address, path: str) -> AsyncGenerator[Piece, None]:
        """Yield the answers of one address. Answers that it leaves out are requested one by one."""
        left: Sequence[int] = ()
        try:
            async with aclosing(self._stream(address, path)) as pieces:
                async for piece in pieces:
                    yield piece
        except FewerAnswersError as error:
            log.info("%s; the others are asked for one by one", error)
            left = error.missing
        for index in left:
            self._before = self._seen
            async with aclosing(self._stream(address, path, index)) as pieces:
                async for piece in pieces:
                    yield replace(piece, index=index)

    async def _stream(
        self, address: Address, path: str, only: int | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of one call to an address, for all answers or for answer `only`."""
        answers = self._request.choices if only is None else 1
        several = only is not None and len(self._request.prompts) > 1
        before, usage = self._usage.prompt if several else 0, None
        try:
            with address.calling(path):
                self._chunks = address.server.stream(path, self._body(only), answers)
                async with aclosing(self._chunks) as chunks:
                    while (chunk := await self._next(chunks)) is not None:
                        address.works()
                        for part in chunk.parts:
                            yield self._take(part)
                        usage = chunk.usage or usage
                        if chunk.usage is not None:
                            self._told(chunk.usage, before)
        finally:  # a call that did not give all answers has cost its prompt, too
            if usage is not None:
                self._route.counts.prompt += self._usage.prompt - before
                self._route.counts.cached += self._usage.cached

    async def _next(self, chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
        """Return the next chunk, None at the end. Raises _Stopped when the relay is stopped, also while this
        waits.
        """
        try:
            async with asyncio.timeout(None) as self._waiting:
                chunk = None if self._stopped else await anext(chunks, None)
        except TimeoutError:
            chunk = None
        finally:
            self._waiting = None
        if self._stopped:
            raise _Stopped
        return chunk

    def _take(self, part: Piece) -> Piece:
        self._began = True
        self._seen += part.tokens
        self._route.counts.generated += part.tokens
        self._text += part.text
        self._reasoned = self._reasoned or bool(part.reasoning)
        return part

    def _told(self, usage: Usage, others: int) -> None:
        """Take in the upstream's token counts. In a continued answer the upstream counts the answer's first
        part as prompt; it is subtracted. `others`: prompt tokens of earlier calls.
        """
        self._seen = max(self._seen, self._before + usage.completion)
        continues = self._before if self._request.choices == 1 else 0
        prompt = max(usage.prompt - continues, 0)
        self._usage = TokenUsage(others + prompt, self._before + usage.completion, min(usage.cached, prompt))


def unavailable(path: str, failures: list[RemoteError]) -> NearfarError:
    """Return the error for a client when no upstream answered. It names no address and quotes no upstream
    message; those are in the log.
    """
    busy = [failure.retry_after or 1.0 for failure in failures if failure.busy]
    if busy:
        return OverloadError("all upstream servers are busy; try again later", min(busy))
    if failures and all(failure.absent for failure in failures):
        return RequestError(f"no upstream server offers {path} for this model", "model")
    return EngineError("no upstream server is available now; try again later")


def upstream_body(request: EngineRequest, model: str, *, salted: bool) -> dict[str, Any]:
    """Return the upstream's request: the call as received, without the fields that stay here, with our own
    decisions.

    `salted`: send the tenant's salt, so that no tenant finds another's prompts in the upstream's cache.
    """
    body = {name: value for name, value in request.body.items() if name not in _KEPT_BACK}
    body |= {"model": model}
    if "priority" in body:
        body["priority"] = request.priority
    if salted and request.tenant.salt:
        body["cache_salt"] = request.tenant.salt
    return body


def one_answer(body: Mapping[str, Any], request: EngineRequest, index: int) -> dict[str, Any]:
    """Return the request for one answer of several, with its own prompt and a seed that the others do not
    have.
    """
    made = {**body, "n": 1}
    made.pop("best_of", None)
    if not request.chat:
        prompt = request.prompts[index // request.n]
        made["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    if isinstance(seed := body.get("seed"), int):
        made["seed"] = seed + index % request.n
    return made


def prompt_size(request: EngineRequest) -> int:
    """Approximate size of the prompt, in characters or tokens."""
    return characters(request.messages) if request.chat else sum(map(len, request.prompts))


def prompt_text(request: EngineRequest) -> str:
    """The prompt as text, for affinity and estimates."""
    if request.chat:
        return json.dumps([request.tools, request.messages], ensure_ascii=False)
    return "\n".join(
        prompt if isinstance(prompt, str) else " ".join(map(str, prompt)) for prompt in request.prompts
    )
