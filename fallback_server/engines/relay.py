"""Relays one request through upstream servers: streams it, retries before its first token, continues after
it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from nearfar.edge_runtime.openai.pieces import Piece, joined
from nearfar.edge_runtime.text.beside import characters
from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.fallback_server.engines.addresses import Address, AddressBook
from nearfar.fallback_server.engines.base import (
    EngineRequest,
    Prepared,
    TokenUsage,
)
from nearfar.format.service_fields import SERVICE_FIELDS
from nearfar.remote.answer import Passing
from nearfar.remote.chunks import Passed, StreamChunk, UsageCounts
from nearfar.remote.clock import Clock, StoppedError
from nearfar.remote.continuing import continued
from nearfar.remote.errors import FewerAnswersError, RefusedError, RemoteError, briefly
from nearfar.remote.server import CHAT, COMPLETIONS, IGNORED_HEADER

log = logging.getLogger(__name__)

_KEPT_BACK = frozenset((*SERVICE_FIELDS, "stream_options", "cache_salt", "request_id", "kv_transfer_params"))
"""Fields that are not forwarded: they do not concern the upstream, or (the last two, vLLM's) are for servers
among themselves. The name of the model is the upstream's own.
"""

_FORMED = ("tools", "response_format", "structured_outputs")
"""Fields after which an answer is not plain text."""
PIECE = tuple(each.name for each in fields(Piece))
WHOLE_ONLY = ("prompt_logprobs", "use_beam_search", "audio")
"""Fields whose answers servers do not stream (vLLM, OpenAI): such a request is passed on as it is. Any other
whole answer is read as a stream, so that a server that hangs is noticed, and the answer may go on elsewhere.
"""


@dataclass
class RelayFigures:
    """Figures of a model since the start; `running`: calls under way now."""

    running: int = 0
    prompt: int = 0
    generated: int = 0
    cached: int = 0
    retries: int = 0
    continued: int = 0

    def add(self, usage: TokenUsage) -> None:
        """Count the tokens of a whole answer."""
        self.prompt += usage.prompt
        self.cached += usage.cached
        self.generated += usage.completion


@dataclass(frozen=True)
class UpstreamRoute:
    """Where a request may go. `model`: its name at the upstream. `continues`: an answer may continue at
    another address. `salts`: the upstream takes `cache_salt`. `priorities`: it takes `priority`.
    """

    book: AddressBook
    model: str
    attempts: int
    continues: bool
    salts: bool
    priorities: bool
    counts: RelayFigures

    @contextmanager
    def calling(self, address: Address, path: str) -> Iterator[None]:
        """Count a call to a path of an address as under way."""
        self.counts.running += 1
        try:
            with address.calling(path):
                yield
        finally:
            self.counts.running -= 1


class Relay:
    """The answers of one request, wherever they are computed."""

    def __init__(self, route: UpstreamRoute, prepared: Prepared) -> None:
        self._route, self._request = route, prepared.request
        # Affinity decides whose cache knows the prompt: it depends on the tenant's salt and the prompt.
        self._affinity = f"{prepared.request.tenant.salt}{prepared.beginning}"
        self._usage = TokenUsage(prepared.prompt_tokens)
        self._before = 0  # tokens of the streams that were cut
        self._seen = 0  # tokens of the cut streams and of the present one
        self._text = ""
        self._began = self._reasoned = False
        self._clock: Clock | None = None
        self._ended_by: NearfarError | None = None
        self._stopped = False
        self.ignored = ""
        """The fields that the upstream ignored, as its header names them."""
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
        except StoppedError:
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
                log.warning("upstream %s cannot continue an answer: %s", address.server.name, briefly(error))
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
        if self._clock is not None:
            self._clock.stop()

    def _can_continue(self) -> bool:
        """Whether the text so far is all that another server must know: a single plain-text answer without
        reasoning.
        """
        request = self._request
        asked = any(request.body.get(name) is not None for name in _FORMED)
        told = request.logprobs is not None or request.echo or request.token_ids
        plain = not asked and request.grammar is None and not told
        text = request.chat or isinstance(request.prompts[0], str)
        return self._route.continues and plain and text and request.choices == 1 and not self._reasoned

    def _body(self, only: int | None) -> dict[str, Any]:
        body = upstream_body(self._request, self._route)
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
        server, clock = address.server, Clock(address.server.waits.first_token)
        self._clock = clock
        if self._stopped:
            raise StoppedError
        try:
            with self._route.calling(address, path):
                body, passing = self._body(only), self._passing(only)
                if passing is not None and passing.whole and _whole_only(body):
                    stream = server.whole(path, body, answers, clock, passing, self._heard)
                else:
                    stream = server.stream(path, body, answers, clock, passing, self._heard)
                async with aclosing(stream) as chunks:
                    async for chunk in chunks:
                        if self._stopped:
                            raise StoppedError
                        address.works()
                        for piece in self._pieces(chunk):
                            yield piece
                        usage = chunk.usage or usage
                        if chunk.usage is not None:
                            self._told(chunk.usage, before)
        finally:  # a call that did not give all answers has cost its prompt, too
            if usage is not None:
                self._route.counts.prompt += self._usage.prompt - before
                self._route.counts.cached += self._usage.cached

    def _heard(self, headers: Mapping[str, str]) -> None:
        self.ignored = headers.get(IGNORED_HEADER, "")

    def _passing(self, only: int | None) -> Passing | None:
        """How the events of a call are passed on; None where they are read and written again: answers that
        are asked for one by one have another index, and a continued answer has begun with another id.
        """
        request = self._request
        if not request.passed or only is not None or self._seen:
            return None
        model = None if self._route.model == request.model else request.model
        usage = request.usage_asked and request.choices == 1  # others may be asked for one by one
        return Passing(model, usage, request.stream_options, whole=not request.body.get("stream"))

    def _pieces(self, chunk: StreamChunk) -> Iterator[Piece]:
        """Yield what came together. Passed events are one piece where there is one answer."""
        if not chunk.data and chunk.merger is None:
            yield from map(self._take, chunk.parts)
            return
        if len(chunk.parts) > 1 and self._request.choices == 1:
            chunk = replace(chunk, parts=(joined(0, chunk.parts),))
        data, name, usage_told = chunk.data, chunk.id, chunk.usage is not None and self._request.choices == 1
        for part in chunk.parts or (Piece(),):
            part = self._take(part)
            said: dict[str, Any] = {each: getattr(part, each) for each in PIECE}
            yield Passed(**said, data=data, usage_told=usage_told, id=name, merger=chunk.merger)
            data, name = b"", ""

    def _take(self, part: Piece) -> Piece:
        self._began = True
        self._seen += part.tokens
        self._route.counts.generated += part.tokens
        self._text += part.text
        self._reasoned = self._reasoned or bool(part.reasoning)
        return part

    def _told(self, usage: UsageCounts, others: int) -> None:
        """Take in the upstream's token counts. In a continued answer the upstream counts the answer's first
        part as prompt; it is subtracted. `others`: prompt tokens of earlier calls.
        """
        seen = max(self._seen, self._before + usage.completion)
        self._route.counts.generated += seen - self._seen
        self._seen = seen
        continues = self._before if self._request.choices == 1 else 0
        prompt = max(usage.prompt - continues, 0)
        self._usage = TokenUsage(others + prompt, self._before + usage.completion, min(usage.cached, prompt))


def _whole_only(body: Mapping[str, Any]) -> bool:
    """Whether a request asks for what servers do not stream. With prompt_logprobs 0 that is the
    log-probability of each token of the prompt alone.
    """
    return any(body.get(name) not in (None, "") and body[name] is not False for name in WHOLE_ONLY)


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


def upstream_body(request: EngineRequest, route: UpstreamRoute) -> dict[str, Any]:
    """Return the upstream's request: the call as received, without the fields that stay here, with our own
    decisions: the tenant's salt, so that no tenant finds another's prompts in the upstream's cache, and the
    tenant's priority.
    """
    body = {name: value for name, value in request.body.items() if name not in _KEPT_BACK}
    body |= {"model": route.model}
    if "priority" in body or (route.priorities and request.priority):
        body["priority"] = request.priority
    if route.salts and request.tenant.salt:
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
