"""A side behind an OpenAI-compatible address: the cloud, or a server on this device."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from nearfar.edge_runtime.openai.records import Usage
from nearfar.errors import RequestError
from nearfar.hosts import is_local
from nearfar.machine import NONCE_BYTES, proves
from nearfar.remote.chunks import StreamChunk
from nearfar.remote.continuing import continued
from nearfar.remote.errors import RemoteError
from nearfar.remote.server import CHAT, Server, Waits, client, root_of
from nearfar.routing.policy import Timeouts
from nearfar.routing.shapes import UsagePiece
from nearfar.routing.sides import SideCall, SideError, estimate
from nearfar.routing.speed import Speeds
from nearfar.routing.types import FEATURES, Feature

KEY_VARIABLE = "NEARFAR_CLOUD_KEY"


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server.

    `url`: with or without /v1. `model` None: the first that it lists. `key` None: from NEARFAR_CLOUD_KEY, or
    none. `context`: tokens; None: as listed, or unknown. `features`: the supported features. Prices are per
    million tokens. `continues`: the server takes `continue_final_message` (nearfar, vLLM), so that it can
    continue an answer that was begun elsewhere. `prefill_tps`: tokens per second, if known. `cache_seconds`:
    how long its cache keeps a conversation.
    """

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    context: int | None = None
    features: tuple[Feature, ...] = FEATURES
    price_in: float = 0
    price_out: float = 0
    continues: bool = True
    prefill_tps: float | None = None
    cache_seconds: float = 300.0

    def __post_init__(self) -> None:
        """Check the fields. Raises RequestError for an invalid address or a key that is not a string."""
        parts = urlsplit(self.url) if isinstance(self.url, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(
                f"the address of an endpoint must be such as http://127.0.0.1:8000, not {self.url!r:.80}",
                "url",
            )
        if not isinstance(self.key, str | None):
            raise RequestError(f"key must be a string, not a {type(self.key).__name__}", "key")

    @property
    def root(self) -> str:
        """The address without /v1."""
        return root_of(self.url)

    @property
    def port(self) -> int:
        """The port of the address."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def local(self) -> bool:
        """Whether the address is this machine's."""
        return is_local(urlsplit(self.url).hostname or "")


class EndpointSide:
    """Calls one endpoint. Nothing is sent before the first call."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts, *, use_key: bool = True) -> None:
        self.endpoint, self.features = endpoint, endpoint.features
        self.speeds = Speeds(prefill_tps=endpoint.prefill_tps)
        self.context = endpoint.context
        self._timeouts = timeouts
        self._model = endpoint.model
        self._described = endpoint.model is not None and endpoint.context is not None
        key = endpoint.key or (os.environ.get(KEY_VARIABLE) if use_key else None)
        # Addresses of this machine are reached directly, whatever proxy the environment names.
        self._http = client(key, timeouts.connect, direct=endpoint.local)
        waits = Waits(timeouts.connect, timeouts.first_token, timeouts.between)
        self._server = Server(endpoint.root, self._http, waits)

    async def describe(self) -> None:
        """Query the endpoint for the model and its context where they are not given. Raises SideError where
        it does not answer.
        """
        if self._described:
            return
        try:
            listed = await self._server.models(self._timeouts.connect)
        except RemoteError as error:
            raise _side_error(error) from error
        chosen = next((model for model in listed if self._model in (None, model.id)), None)
        if self._model is None and chosen is None:
            raise SideError(f"{self.endpoint.root}/v1/models lists no model", "shape")
        if chosen is not None:
            self._model, self.context = chosen.id, self.context or chosen.context
        self._described = True

    async def name_model(self) -> None:
        """Query the endpoint for the model where none is given. Raises SideError where it does not answer."""
        if self._model is None:
            await self.describe()

    async def elsewhere(self) -> str | None:
        """Why the server is not proven to compute here. None where it proves now that it runs on this machine
        as this user, and says that it computes the model itself.

        An address of this machine is not proof: an ssh tunnel, a container's published port and a proxy have
        one, too.
        """
        nonce = secrets.token_hex(NONCE_BYTES)
        try:
            listed = await self._server.models(self._timeouts.connect, nonce)
        except RemoteError as error:
            raise _side_error(error) from error
        found = next((model for model in listed if model.id == self._model), None)
        if found is None or not found.here:
            return "it does not say that it computes what it answers"
        if found.proof is None:
            return "it does not prove that it runs here: an older nearfar, or one without a key of this user"
        if not proves(found.proof, nonce, self.endpoint.port):
            return "it runs on another machine, as another user, or behind another port"
        return None

    async def stream(self, call: SideCall) -> AsyncGenerator[UsagePiece, None]:
        """Yield the endpoint's answer. A continuation needs an endpoint that `continues`. Raises
        SideError.
        """
        if call.prefix and not self.endpoint.continues:
            raise SideError(
                f"{self.endpoint.root} cannot continue an answer that another server began",
                "no_continuation",
            )
        await self.name_model()
        body = {
            **replace(call, prefix="").body,
            "model": self._model,
            "messages": list(map(dict, call.messages)),
        }
        if call.prefix:
            body = continued(body, call.prefix)
        watch = _Watch(self.speeds, estimate(call.messages, call.params))
        try:
            async with aclosing(self._server.stream(CHAT, body)) as chunks:
                async for chunk in chunks:
                    for piece in _pieces(chunk):
                        watch.saw(piece)
                        yield piece
        except RemoteError as error:
            raise _side_error(error) from error
        watch.end()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


class _Watch:
    """Measures the times of an answer."""

    def __init__(self, speeds: Speeds, prompt_tokens: int) -> None:
        self._speeds, self._prompt = speeds, prompt_tokens
        self._start = time.monotonic()
        self._first = self._last = 0.0
        self._tokens = 0

    def saw(self, piece: UsagePiece) -> None:
        """Note a piece that came."""
        if piece.tokens:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._tokens += piece.tokens

    def end(self) -> None:
        """Note the end of the answer, and update the speeds."""
        if self._first:
            self._speeds.first_token(self._first - self._start, self._prompt)
            self._speeds.decode(self._tokens - 1, self._last - self._first)


def _side_error(error: RemoteError) -> SideError:
    return SideError(str(error), error.code, retry_after=error.retry_after, busy=error.busy)


def _pieces(chunk: StreamChunk) -> list[UsagePiece]:
    """Convert a chunk to the client's own records."""
    found = [UsagePiece(**vars(part)) for part in chunk.parts]
    if (usage := chunk.usage) is not None:
        found.append(UsagePiece(usage=Usage(usage.prompt, usage.completion, usage.prompt + usage.completion)))
    return found
