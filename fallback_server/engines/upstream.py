"""Engine in front of OpenAI-compatible servers (vLLM, SGLang, llama.cpp, nearfar): it balances, retries and
continues.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.edge_runtime.text.beside import beside
from nearfar.errors import EngineError, RequestError
from nearfar.fallback_server.backend import BackendStats
from nearfar.fallback_server.engines.addresses import AddressBook
from nearfar.fallback_server.engines.base import (
    EmbeddingVectors,
    EngineRequest,
    ModelInfo,
    Prepared,
    Prompt,
    Scores,
    TokenUsage,
    Unready,
)
from nearfar.fallback_server.engines.choosing import AUTO, AutoModels, Standing
from nearfar.fallback_server.engines.forwarding import ForwardedRequest, forwarded_call
from nearfar.fallback_server.engines.relay import (
    Relay,
    RelayFigures,
    UpstreamRoute,
    prompt_size,
    prompt_text,
    unavailable,
)
from nearfar.fallback_server.prefixes import BLOCKS, CHARACTERS
from nearfar.fallback_server.tenants import Tenant
from nearfar.remote.breaker import BreakerOptions
from nearfar.remote.errors import RemoteError, briefly
from nearfar.remote.forms import Form
from nearfar.remote.server import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IGNORED_HEADER,
    MESSAGES,
    RESPONSES,
    Server,
    Waits,
    client,
    root_of,
)

log = logging.getLogger(__name__)

KEY_VARIABLE = "NEARFAR_UPSTREAM_KEY"
INPUTS_AT_ONCE = 256
"""Embeddings in one call. The limit keeps an answer, as text, within remote.server.ANSWER_BYTES."""
OURS = ("model", "input", "encoding_format", "dimensions")
"""Fields of an embedding request that this server handles itself."""
CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class UpstreamOptions:
    """How upstream servers are used. Times are in seconds.

    `key`: sent as the bearer token; None means NEARFAR_UPSTREAM_KEY. `continues`: the servers take
    `continue_final_message` (vLLM, nearfar), so that an answer can continue elsewhere when its server fails.
    `salts`: they take `cache_salt` (vLLM, SGLang, nearfar). `priorities`: they take `priority` (vLLM with
    `--scheduling-policy priority`, nearfar); else only a request that has the field is sent with it.
    `failures` in a row open a circuit breaker for `open_seconds`. `slack`: how many more requests than the
    least loaded an address may have and still be preferred for a prompt whose beginning it knows. Each
    address is queried for its models every `probe_seconds`. `auto`: the models that the name "auto" stands
    for.
    """

    key: str | None = None
    continues: bool = False
    salts: bool = True
    priorities: bool = False
    attempts: int = 3
    failures: int = 3
    open_seconds: float = 10.0
    slack: int = 4
    probe_seconds: float = 10.0
    probe_timeout: float = 5.0
    connect_timeout: float = 5.0
    first_token_timeout: float = 120.0
    between_timeout: float = 60.0
    auto: AutoModels | None = None


class UpstreamEngine:
    """Several addresses as one engine. Each request goes to addresses that serve its model."""

    passes_on = True

    def __init__(self, urls: Seq[str], options: UpstreamOptions, names: Seq[str] = ()) -> None:
        waits = Waits(options.connect_timeout, options.first_token_timeout, options.between_timeout)
        self._http = client(options.key or os.environ.get(KEY_VARIABLE), options.connect_timeout, direct=True)
        breaker = BreakerOptions(options.failures, options.open_seconds, options.open_seconds)
        self.options = options
        self.book = AddressBook(
            [Server(url, self._http, waits) for url in map(root_of, urls)], breaker, options.slack
        )
        self.counts: dict[str, RelayFigures] = {}
        """Figures by model."""
        self._names, self._named = tuple(names), ""
        self._unlisted: tuple[str, ...] = ()
        self._live: dict[str, Relay] = {}
        self._checking: asyncio.Task[bool] | None = None
        self._prober = asyncio.create_task(self._list_always())

    @classmethod
    async def connect(cls, urls: Seq[str], options: UpstreamOptions, names: Seq[str] = ()) -> Self:
        """Query the addresses for their models; an address that is not up yet is queried again.

        `names`: the names that clients use for the model here; by default each model's upstream name.
        """
        engine = cls(urls, options, names)
        if not await engine._list():
            roots = ", ".join(address.server.name for address in engine.book.addresses)
            log.warning(
                "none of %s lists a model at /v1/models; asking again every %g s",
                roots,
                options.probe_seconds,
            )
        return engine

    def models(self) -> tuple[ModelInfo, ...]:
        """All models that the addresses serve, or the one model under each of its names. Empty while none is
        known yet.
        """
        found = [ModelInfo(model.id, model.context or 0) for model in self.book.models()]
        if not self._names:
            auto = self.options.auto
            if auto is None or not any(info.id in auto.models for info in found):
                return tuple(found)
            return (*found, ModelInfo(AUTO, stands_for=auto.models))
        if not self._named:
            return ()
        context = next((model.context_length for model in found if model.id == self._named), 0)
        return tuple(ModelInfo(name, context) for name in self._names)

    async def prepare(self, request: EngineRequest) -> Prepared:
        """Estimate the prompt's tokens; the upstream tokenizes and checks."""
        text = await beside(lambda: prompt_text(request), prompt_size(request))
        tokens = max(len(text) // CHARS_PER_TOKEN, 1)
        if self.options.auto is not None and request.model == AUTO:
            high = await beside(lambda: high_estimate(request, text), prompt_size(request))
            request = replace(request, model=await self._chosen(self.options.auto, request, high))
        return Prepared(request, (), tokens, beginning=text[: CHARACTERS * BLOCKS], estimated=True)

    async def _chosen(self, auto: AutoModels, request: EngineRequest, tokens: int) -> str:
        """Return the model that answers a request to "auto". Raises EngineError where neither can. Which one
        counts the tokens of a prompt makes no difference: the number is an estimate.
        """
        if request.most_tokens is not None:
            return auto.small
        path = CHAT if request.chat else COMPLETIONS
        standings = [self._standing(name, path, request) for name in auto.models]
        large = await beside(lambda: auto.choose(request, tokens, *standings), prompt_size(request))
        if large is None:
            raise EngineError("none of the models that auto stands for can answer this now; try again later")
        return auto.large if large else auto.small

    def _standing(self, model: str, path: str, request: EngineRequest) -> Standing:
        up = model != request.without and request.tenant.allows(model) and self.book.able(path, model)
        context = next((info.context_length for info in self.models() if info.id == model), 0)
        return Standing(up, context)

    async def submit(self, prepared: Prepared) -> Relay:
        """Start a request; it is sent when its pieces are iterated."""
        relay = self._live[prepared.request.id] = Relay(self._route(prepared.request.model), prepared)
        relay.on_close = lambda: self._live.pop(prepared.request.id, None)
        return relay

    async def cancel(self, request_id: str) -> None:
        """End a request."""
        if (relay := self._live.get(request_id)) is not None:
            await relay.abort()

    async def embed(self, prepared: Prepared) -> EmbeddingVectors:
        """Return one vector per input, pooled as the upstream does it."""
        request, route = prepared.request, self._route(prepared.request.model)
        own = {key: value for key, value in request.body.items() if key not in OURS}
        vectors, tokens, ignored = list[Vector](), 0, ""
        for start in range(0, len(request.prompts), INPUTS_AT_ONCE):
            part = request.prompts[start : start + INPUTS_AT_ONCE]
            found = await self._embedded(route, {**own, "model": route.model}, part)
            vectors += found.vectors
            tokens += found.tokens
            ignored = found.ignored
        route.counts.add(TokenUsage(tokens))
        return EmbeddingVectors(vectors, tokens, ignored)

    async def _embedded(
        self, route: UpstreamRoute, body: dict[str, Any], inputs: Seq[Prompt]
    ) -> EmbeddingVectors:
        """Return the vectors of at most INPUTS_AT_ONCE inputs from the first address that gives them."""
        failures = list[RemoteError]()
        body = {**body, "input": [item if isinstance(item, str) else list(item) for item in inputs]}
        for address in route.book.candidates("", EMBEDDINGS, route.model, route.attempts):
            try:
                with route.calling(address, EMBEDDINGS):
                    headers: dict[str, str] = {}
                    found = await address.server.embeddings(body, len(inputs), headers.update)
                    return EmbeddingVectors(*found, headers.get(IGNORED_HEADER, ""))
            except RemoteError as error:
                log.warning("upstream %s failed: %s", address.server.name, briefly(error))
                failures.append(error)
        raise unavailable(EMBEDDINGS, failures)

    async def score(self, prepared: Prepared) -> Scores:
        """Raise RequestError: upstreams are asked for text only."""
        raise RequestError("this server passes requests on: ask the server that computes the model")

    def native(self, path: str, model: str, tenant: Tenant) -> frozenset[str] | None:
        """Return the fields that a path takes at the servers of a model; None where none lists the path, or
        where prompts would share a cache with other tenants' although the server could keep them apart.
        """
        name = self._there(model)
        places = [a.paths[path] for a in self.book.addresses if path in a.paths and a.serves(path, name)]
        if not places:
            return None
        fields = frozenset.intersection(*(place.fields for place in places))
        generates = path in (RESPONSES, MESSAGES)  # those below them count tokens, and read no cache
        if generates and self.options.salts and tenant.salt and "cache_salt" not in fields:
            return None
        return fields

    def forward(
        self, prepared: Prepared, path: str, call: Mapping[str, Any] | Form, takes: frozenset[str]
    ) -> ForwardedRequest:
        """Forward a request to a path that `native` gave the fields of."""
        route = self._route(prepared.request.model)
        if isinstance(call, Form):
            return ForwardedRequest(route, prepared, path, call.renamed(route.model))
        return ForwardedRequest(route, prepared, path, forwarded_call(call, route, prepared, takes))

    def _route(self, model: str) -> UpstreamRoute:
        options = self.options
        rights = (options.continues, options.salts, options.priorities)
        counts = self.counts.setdefault(model, RelayFigures())
        return UpstreamRoute(self.book, self._there(model), options.attempts, *rights, counts)

    async def text_of(self, tokens: Seq[int]) -> str:
        """Raise RequestError: the tokenizer is where the model is."""
        return "".join(await self.names_of(tokens))

    async def names_of(self, tokens: Seq[int]) -> list[str]:
        """Raise RequestError, as `text_of`."""
        raise RequestError("this server has no tokenizer: ask the server that computes the model")

    def stats(self) -> BackendStats:
        """Return the figures as counted on this side."""
        there = dict.fromkeys(info.id for info in self.models() if not info.stands_for)
        by_model = {model: _stats(self.counts.get(model, RelayFigures())) for model in there | self.counts}
        return replace(_stats(*self.counts.values()), by_model=by_model)

    async def ready(self) -> bool:
        """Whether a usable address worked lately, or lists a model now."""
        if self._seen_lately():
            return True
        if self._checking is None or self._checking.done():  # one check serves all callers
            self._checking = asyncio.create_task(self._list())
        await asyncio.shield(self._checking)
        return self._seen_lately()

    def unready(self) -> Unready:
        """Name the addresses that do not answer, with the reason."""
        found = ", ".join(f"{address.server.name} ({address.why})" for address in self.book.addresses)
        lists = any(address.models for address in self.book.addresses)
        return Unready("no upstream server answers" if lists else "no upstream server lists a model", found)

    async def close(self, drain: float = 0.0) -> None:
        """Wait at most `drain` seconds for requests under way, then stop."""
        deadline = time.monotonic() + drain
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for relay in list(self._live.values()):
            await relay.fail(EngineError("the server is shutting down"))
        self._prober.cancel()
        with suppress(asyncio.CancelledError):
            await self._prober
        await self._http.aclose()

    def _there(self, model: str) -> str:
        """The upstream's name for a model."""
        return self._named if model in self._names else model

    def _seen_lately(self) -> bool:
        since = time.monotonic() - 2 * self.options.probe_seconds
        return any(
            a.models and a.answers and a.heard is not None and a.heard > since for a in self.book.addresses
        )

    async def _list(self) -> bool:
        """Query all addresses for their models. Returns whether any lists one."""
        addresses = self.book.addresses
        found = await asyncio.gather(*(address.list(self.options.probe_timeout) for address in addresses))
        if self._names and not self._named and any(found):
            self._named = self.book.models()[0].id
            log.info("%s is the upstream's %s", ", ".join(self._names), self._named)
        self._look_for_auto()
        for address in addresses:
            if self._named and address.models and all(model.id != self._named for model in address.models):
                log.warning(
                    "upstream %s does not serve %s and gets no requests", address.server.name, self._named
                )
        return any(found)

    def _look_for_auto(self) -> None:
        """Log which models of `auto` no server lists, whenever that has changed."""
        auto, listed = self.options.auto, [model.id for model in self.book.models()]
        if auto is None or not listed:
            return
        unlisted = tuple(name for name in auto.models if name not in listed)
        if unlisted and unlisted != self._unlisted:
            rest = [name for name in auto.models if name in listed]
            log.warning(
                "--auto names %s, which no upstream server lists: %s; they list %s",
                " and ".join(unlisted),
                f"{rest[0]} answers all requests to auto" if rest else "there is no model auto",
                ", ".join(listed),
            )
        self._unlisted = unlisted

    async def _list_always(self) -> None:
        """Query the addresses repeatedly, so that new and lost servers are noticed before a request meets
        them.
        """
        while True:
            await asyncio.sleep(self.options.probe_seconds)
            await self._list()


def high_estimate(request: EngineRequest, text: str) -> int:
    """Estimate the tokens of a prompt that is `text`, rather too many: a prompt of token ids has as many; of
    text each byte beyond ASCII can be one, and a token has three characters of ASCII or more.
    """
    if not request.chat and all(not isinstance(prompt, str) for prompt in request.prompts):
        return max((len(prompt) for prompt in request.prompts), default=1)
    plain, size = len(text.encode("ascii", "ignore")), len(text.encode(errors="replace"))
    return max(plain // 3 + size - plain, 1)


def _stats(*counts: RelayFigures) -> BackendStats:
    """Return the figures of one or several models together."""
    prompt, cached = sum(each.prompt for each in counts), sum(each.cached for each in counts)
    return BackendStats(
        running=sum(each.running for each in counts),
        waiting=0,
        cache_usage=0.0,
        prefix_hits=cached,
        prefix_queries=prompt,
        preemptions=0,
        generated_tokens=sum(each.generated for each in counts),
        prompt_tokens=prompt,
        steps=0,
        restarts=0,
    )
