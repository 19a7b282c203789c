"""Engine in front of OpenAI-compatible servers (vLLM, SGLang, llama.cpp, nearfar): balance, retry, continue."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from nearfar.errors import EngineError, RequestError
from nearfar.fallback_server.backend import BackendStats
from nearfar.fallback_server.engines.addresses import Address, AddressBook
from nearfar.fallback_server.engines.base import Embeddings, EngineRequest, ModelInfo, Prepared, Prompt
from nearfar.fallback_server.engines.relay import Relay, UpstreamError, refusal

log = logging.getLogger(__name__)

KEY_VARIABLE = "NEARFAR_UPSTREAM_KEY"
PATHS = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""The only paths that are ever asked for, whatever a client sends."""
CHARS_PER_TOKEN = 4
ANSWER_ESTIMATE = 1024
"""Tokens that an answer without max_tokens is taken to cost."""


@dataclass(frozen=True)
class UpstreamOptions:
    """How upstream servers are used. Times are seconds.

    `key`: sent as the bearer token; None: from NEARFAR_UPSTREAM_KEY. `continues`: the servers take
    `continue_final_message` (vLLM, nearfar), so that an answer can go on elsewhere when its server fails.
    `failures` in a row open an address's circuit for `open_seconds`. `slack`: how many requests more than the least
    loaded an address may have and still be preferred for a prompt whose beginning it knows.
    """

    key: str | None = None
    continues: bool = False
    attempts: int = 3
    failures: int = 3
    open_seconds: float = 10.0
    slack: int = 4
    probe_seconds: float = 10.0
    probe_timeout: float = 5.0
    connect_timeout: float = 5.0
    first_token_timeout: float = 120.0
    between_timeout: float = 60.0


@dataclass
class Counts:
    """Figures since the start."""

    prompt: int = 0
    generated: int = 0
    cached: int = 0
    retries: int = 0
    continued: int = 0


class UpstreamEngine:
    """Several addresses of the same model as one engine."""

    def __init__(self, urls: Seq[str], options: UpstreamOptions, models: Seq[ModelInfo], remote: str) -> None:
        self.options = options
        self.book = AddressBook(
            urls, failures=options.failures, seconds=options.open_seconds, slack=options.slack
        )
        self.counts = Counts()
        self.client = _client(options)
        self.remote = remote
        self._models = tuple(models)
        self._live: dict[str, Relay] = {}
        self._checking: asyncio.Task[bool] | None = None
        self._prober = asyncio.create_task(self._probe_always())

    @classmethod
    async def connect(cls, urls: Seq[str], options: UpstreamOptions, names: Seq[str] = ()) -> UpstreamEngine:
        """Ask the addresses for their model. `names`: what clients call it here; by default as it is called there."""
        roots = [url.rstrip("/").removesuffix("/v1") for url in urls]
        async with _client(options) as client:
            answers = await asyncio.gather(*(_ask_models(client, root) for root in roots))
        found = next((answer for answer in answers if answer), None)
        if not found:
            raise EngineError(f"none of {', '.join(roots)} lists a model at /v1/models; start it, or correct the address")
        remote = found[0]
        models = [ModelInfo(name, remote.context_length) for name in names] or [remote]
        return cls(roots, options, models, remote.id)

    def models(self) -> tuple[ModelInfo, ...]:
        """The model under each of its names."""
        return self._models

    async def prepare(self, request: EngineRequest) -> Prepared:
        """Estimate the cost; the upstream tokenizes and checks."""
        tokens = max(len(prompt_text(request)) // CHARS_PER_TOKEN, 1)
        answer = request.max_tokens if request.max_tokens is not None else ANSWER_ESTIMATE
        return Prepared(request, (), tokens, tokens + answer * request.choices)

    async def submit(self, prepared: Prepared) -> Relay:
        """Start a request; it goes out when its pieces are asked for."""
        relay = Relay(self, prepared)
        self._live[prepared.request.id] = relay
        relay.on_close = lambda: self._live.pop(prepared.request.id, None)
        return relay

    async def cancel(self, request_id: str) -> None:
        """End a request."""
        if (relay := self._live.get(request_id)) is not None:
            await relay.abort()

    async def embed(self, model: str, inputs: Seq[Prompt], pooling: Literal["mean", "last"]) -> Embeddings:
        """One vector an input, pooled as the upstream does it."""
        body = {"model": self.remote, "input": [item if isinstance(item, str) else list(item) for item in inputs]}
        tried: set[Address] = set()
        while (address := self.book.choose("", tried)) is not None and len(tried) < self.options.attempts:
            tried.add(address)
            try:
                answer = await self.post(address, "/v1/embeddings", body)
            except UpstreamError:
                continue
            vectors = [item["embedding"] for item in sorted(answer["data"], key=lambda item: item["index"])]
            return Embeddings(vectors, int(answer.get("usage", {}).get("prompt_tokens", 0)))
        raise EngineError("no upstream server could embed the inputs; try again later")

    def stats(self) -> BackendStats:
        """What was seen from here."""
        counts = self.counts
        return BackendStats(
            running=sum(address.under_way for address in self.book.addresses), waiting=0, cache_usage=0.0,
            prefix_hits=counts.cached, prefix_queries=counts.prompt, preemptions=0, generated_tokens=counts.generated,
            prompt_tokens=counts.prompt, steps=0, restarts=0,
        )  # fmt: skip

    async def ready(self) -> bool:
        """Whether an address gave a token lately, or gives one now."""
        now = time.monotonic()
        fresh = 2 * self.options.probe_seconds
        if any(a.breaker.allows() and now - a.last_token < fresh for a in self.book.addresses if a.last_token):
            return True
        if self._checking is None or self._checking.done():  # however many ask
            self._checking = asyncio.create_task(self._probe_all())
        return await asyncio.shield(self._checking)

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
        await self.client.aclose()

    async def post(self, address: Address, path: str, body: dict[str, Any], timeout: float | None = None) -> Any:
        """A whole answer. RequestError if the upstream refuses, UpstreamError if it fails."""
        address.breaker.begin()
        address.under_way += 1
        try:
            response = await self.client.post(
                checked(address, path), json=body, timeout=timeout or self.options.first_token_timeout
            )
            error = refusal(response.status_code, response.text, response.headers) if response.is_error else None
            data = None if error else response.json()
        except (httpx.HTTPError, ValueError) as failure:
            address.breaker.failure()
            raise UpstreamError(f"{address.url}: {type(failure).__name__}: {failure}") from failure
        except asyncio.CancelledError:
            address.breaker.abandoned()
            raise
        finally:
            address.under_way -= 1
        if error is not None and not isinstance(error, RequestError):
            address.breaker.failure()
            raise error
        address.breaker.success()
        if error is not None:
            raise error
        return data

    async def probe(self, address: Address) -> bool:
        """Ask for one real token."""
        body = {"model": self.remote, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        try:
            answer = await self.post(address, "/v1/completions", body, self.options.probe_timeout)
            if not answer["choices"]:
                raise UpstreamError(f"{address.url}: the probe had no answer")
        except (UpstreamError, RequestError, LookupError, TypeError) as error:
            log.warning("upstream probe failed: %s", error)
            return False
        address.last_token = time.monotonic()
        return True

    async def _probe_all(self) -> bool:
        return any(await asyncio.gather(*(self.probe(address) for address in self.book.addresses)))

    async def _probe_always(self) -> None:
        """Probe what gave no token lately, so that requests do not find out what is down."""
        while True:
            await asyncio.sleep(self.options.probe_seconds)
            now = time.monotonic()
            quiet = [a for a in self.book.addresses if now - a.last_token > self.options.probe_seconds]
            await asyncio.gather(*(self.probe(address) for address in quiet if address.breaker.allows()))


def checked(address: Address, path: str) -> str:
    """The URL of an allowed path."""
    if path not in PATHS:
        raise RequestError(f"{path} is not passed on", "path")
    return address.url + path


def prompt_text(request: EngineRequest) -> str:
    """What the prompt says, for affinity and estimates."""
    if request.chat:
        return json.dumps([request.tools, request.messages], ensure_ascii=False)
    return "\n".join(prompt if isinstance(prompt, str) else " ".join(map(str, prompt)) for prompt in request.prompts)


def _client(options: UpstreamOptions) -> httpx.AsyncClient:
    """Reaches addresses directly: neither proxies of the environment nor redirects are followed."""
    key = options.key or os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(options.between_timeout, connect=options.connect_timeout)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False, follow_redirects=False)


async def _ask_models(client: httpx.AsyncClient, root: str) -> list[ModelInfo]:
    try:
        response = await client.get(f"{root}/v1/models")
        response.raise_for_status()
        data = response.json()["data"]
        return [ModelInfo(str(item["id"]), int(item.get("max_model_len") or 0)) for item in data]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        log.warning("upstream %s: %s: %s", root, type(error).__name__, error)
        return []


