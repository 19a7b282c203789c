"""A side behind an OpenAI-compatible address: the cloud, or a server on this device."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from nearfar.errors import RequestError
from nearfar.routing.policy import Timeouts
from nearfar.routing.shapes import Piece, piece_of, usage_of
from nearfar.routing.sides import Call, SideError, estimate
from nearfar.routing.speed import Speeds
from nearfar.routing.types import FEATURES, Feature

KEY_VARIABLE = "NEARFAR_CLOUD_KEY"
_BUSY = (429,)
_BAD = (400, 413, 422)


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server.

    `url`: with or without /v1. `model` None: the first that it lists. `key` None: from NEARFAR_CLOUD_KEY, or none. `context`:
    tokens; None: as it lists, or unknown. `features`: what it can do. Prices are per million tokens. `continues`: it
    takes `continue_final_message` (nearfar, vLLM), so that it can go on with an answer that was begun elsewhere.
    `prefill_tps`: if known. `cache_seconds`: how long its cache keeps a conversation.
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

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def local(self) -> bool:
        """Whether the address can only be this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


class EndpointSide:
    """Calls one endpoint. Nothing is sent before the first call."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts, *, use_key: bool = True) -> None:
        if urlsplit(endpoint.url).scheme not in ("http", "https"):
            raise RequestError(f"the address must begin with http:// or https://, not {endpoint.url!r}", "url")
        self.endpoint, self.features = endpoint, endpoint.features
        self.speeds = Speeds(prefill_tps=endpoint.prefill_tps)
        self.context = endpoint.context
        self._timeouts = timeouts
        self._model = endpoint.model
        self._described = endpoint.model is not None and endpoint.context is not None
        key = endpoint.key or (os.environ.get(KEY_VARIABLE) if use_key else None)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=timeouts.connect),
            # Addresses of this machine are reached directly, whatever proxy the environment names.
            trust_env=not endpoint.local,
            follow_redirects=False,
        )

    async def describe(self) -> None:
        """Ask for the model and its context where they are not given. SideError where the endpoint does not answer."""
        if self._described:
            return
        try:
            async with asyncio.timeout(self._timeouts.connect):
                response = await self._client.get(f"{self.endpoint.root}/v1/models")
                raise_for(response.status_code, response.text, response.headers)
                listed = response.json()["data"]
            named = next((item for item in listed if item["id"] == self._model), None)
            chosen = named or (listed[0] if self._model is None else {})
            self._model = self._model or str(chosen["id"])
            self.context = self.context or chosen.get("max_model_len")
            self._described = True
        except (httpx.HTTPError, TimeoutError) as error:
            raise _unreachable(self.endpoint.root, error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise SideError(f"{self.endpoint.root}/v1/models lists no model: {error}", "shape") from error

    async def computes_here(self) -> bool:
        """Whether the server says, now, that it computes on its own machine (its list of models). A relay does not."""
        try:
            async with asyncio.timeout(self._timeouts.connect):
                response = await self._client.get(f"{self.endpoint.root}/v1/models")
                raise_for(response.status_code, response.text, response.headers)
                listed = {item["id"]: item.get("x_nearfar") or {} for item in response.json()["data"]}
            return bool(listed.get(self._model, {}).get("computes") == "here")
        except (httpx.HTTPError, TimeoutError) as error:
            raise _unreachable(self.endpoint.root, error) from error
        except (ValueError, LookupError, TypeError, AttributeError):
            return False

    async def stream(self, call: Call) -> AsyncGenerator[Piece, None]:
        """The endpoint's answer. A continuation needs one that `continues`."""
        if call.prefix and not self.endpoint.continues:
            raise SideError(f"{self.endpoint.root} cannot go on with an answer that was begun elsewhere", "no_continuation")
        if self._model is None:
            await self.describe()
        body = {**call.body, "model": self._model, "messages": call.given, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if call.prefix:
            body["add_generation_prompt"] = False
        watch = _Watch(self.speeds, estimate(call.messages, call.params))
        try:
            async with self._answer(body) as response:
                async for piece in self._pieces(response):
                    watch.saw(piece)
                    yield piece
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _unreachable(self.endpoint.root, error) from error
        except TimeoutError as error:
            raise SideError(f"{self.endpoint.root}: {error}", "timeout") from error
        except (ValueError, LookupError, TypeError) as error:
            raise SideError(f"{self.endpoint.root}: not the shape of a chat completion: {error!r}", "shape") from error
        watch.end()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """The response once its head is here. A server may wait with it until there is a token."""
        request = self._client.build_request("POST", f"{self.endpoint.root}/v1/chat/completions", json=body)
        try:
            async with asyncio.timeout(self._timeouts.first_token):
                response = await self._client.send(request, stream=True)
        except TimeoutError:
            raise TimeoutError(f"no answer for {self._timeouts.first_token:g} s") from None
        try:
            if response.is_error:
                raise_for(response.status_code, (await response.aread()).decode(errors="replace"), response.headers)
            yield response
        finally:
            await response.aclose()

    async def _pieces(self, response: httpx.Response) -> AsyncIterator[Piece]:
        finished = False
        async for record in self._records(response):
            if "error" in record:
                raise SideError(f"{self.endpoint.root}: {record['error']}", "error")
            for choice in record.get("choices") or ():
                piece = piece_of(choice)
                if piece.useful:
                    finished = finished or piece.finish is not None
                    yield piece
            if record.get("usage"):
                yield Piece(usage=usage_of(record["usage"]))
        if not finished:
            raise SideError(f"{self.endpoint.root}: the stream ended before its answer", "cut")

    async def _records(self, response: httpx.Response) -> AsyncIterator[Any]:
        lines, timeout = response.aiter_lines(), self._timeouts.first_token
        while True:
            try:
                async with asyncio.timeout(timeout):
                    line = await anext(lines, None)
            except TimeoutError:
                raise TimeoutError(f"no token for {timeout:g} s") from None
            if line is None or line == "data: [DONE]":
                return
            if line.startswith("data:"):
                timeout = self._timeouts.between
                yield json.loads(line[5:])


class _Watch:
    """Takes the time of an answer."""

    def __init__(self, speeds: Speeds, prompt_tokens: int) -> None:
        self._speeds, self._prompt = speeds, prompt_tokens
        self._start = time.monotonic()
        self._first = self._last = 0.0
        self._tokens = 0

    def saw(self, piece: Piece) -> None:
        """A piece came."""
        if piece.count:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._tokens += piece.count

    def end(self) -> None:
        """The answer is whole."""
        if self._first:
            self._speeds.first_token(self._first - self._start, self._prompt)
            self._speeds.decode(self._tokens - 1, self._last - self._first)


def raise_for(status: int, text: str, headers: Mapping[str, str]) -> None:
    """The error of an HTTP status: RequestError where the request is bad, SideError where another side may do better."""
    if status < 400:
        return
    try:
        error = json.loads(text)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, param = text[:200] or f"status {status}", None
    if status in _BAD:
        raise RequestError(message, param)
    raise SideError(f"status {status}: {message}", str(status), retry_after=_seconds(headers), busy=status in _BUSY)


def _seconds(headers: Mapping[str, str]) -> float | None:
    """Retry-After in seconds; a date is taken for none, for clocks differ."""
    try:
        return max(float(headers["retry-after"]), 0.0)
    except (KeyError, ValueError):
        return None


def _unreachable(root: str, error: Exception) -> SideError:
    timeout = isinstance(error, TimeoutError | httpx.TimeoutException)
    refused = isinstance(error, httpx.ConnectError)
    code = "timeout" if timeout else "connection" if refused else "cut"
    return SideError(f"{root}: {type(error).__name__}: {error}", code)
