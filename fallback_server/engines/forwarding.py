"""Forwards requests to an upstream that lists their path, and the answers back."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx

from nearfar.errors import EngineError
from nearfar.fallback_server.engines.base import Prepared, TokenUsage
from nearfar.fallback_server.engines.relay import UpstreamRoute, unavailable
from nearfar.remote.answer import failing
from nearfar.remote.clock import Clock, StoppedError
from nearfar.remote.errors import RemoteError, briefly
from nearfar.remote.events import blocks_of, body, data_of
from nearfar.remote.forms import Form
from nearfar.remote.server import ANSWER_BYTES, ESTIMATED_HEADER, IGNORED_HEADER, Server

log = logging.getLogger(__name__)

EVENTS, JSON = "text/event-stream", "application/json"
_TYPE = re.compile(r"[a-z]+/[a-z0-9.+-]+(; ?charset=[\w-]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class ForwardedChunk:
    """A part of a forwarded answer. The first has its media type, the fields that the upstream ignored, and
    the figures that it estimated, as its headers name them.
    """

    data: bytes
    type: str = ""
    ignored: str = ""
    estimated: str = ""

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.type.startswith(EVENTS)


class ForwardedRequest:
    """A forwarded request. `usage`: its tokens, estimated until the upstream has told them (`told`)."""

    def __init__(
        self, route: UpstreamRoute, prepared: Prepared, path: str, call: Mapping[str, Any] | Form
    ) -> None:
        self._route, self._path, self._call = route, path, call
        self._affinity = f"{prepared.request.tenant.salt}{prepared.beginning}"
        self._model = prepared.request.model
        self.usage, self.told = TokenUsage(prepared.prompt_tokens), False
        self._clock: Clock | None = None

    async def parts(self) -> AsyncGenerator[ForwardedChunk, None]:
        """Yield the answer of the first address that gives one, and count its tokens."""
        try:
            async with aclosing(self._routed()) as parts:
                async for part in parts:
                    yield part
        finally:
            if self.told:
                self._route.counts.add(self.usage)

    async def _routed(self) -> AsyncGenerator[ForwardedChunk, None]:
        route, failures, begun = self._route, list[RemoteError](), False
        for address in route.book.candidates(self._affinity, self._path, route.model, route.attempts):
            try:
                with route.calling(address, self._path):
                    async with aclosing(
                        self._answer(address.server, address.paths[self._path].path)
                    ) as parts:
                        async for part in parts:
                            begun = True
                            yield part
                return
            except StoppedError:
                raise EngineError("the request was ended") from None
            except RemoteError as error:
                log.warning("upstream %s failed: %s", address.server.name, briefly(error))
                if begun:
                    raise EngineError("the upstream server failed during the answer") from error
                failures.append(error)
        raise unavailable(self._path, failures)

    async def aclose(self) -> None:
        """End the wait for the upstream."""
        if self._clock is not None:
            self._clock.stop()

    async def _answer(self, server: Server, path: str) -> AsyncGenerator[ForwardedChunk, None]:
        clock = self._clock = Clock(server.waits.whole)
        async with server.forwarding(path, self._call, clock) as response:
            kind = response.headers.get("content-type", "")
            ignored = response.headers.get(IGNORED_HEADER, "")
            kind = kind if _TYPE.fullmatch(kind) else "application/octet-stream"
            if not kind.startswith(EVENTS):
                data = await clock.wait(body(response, ANSWER_BYTES))
                if data[:1] == b"{" and "content-type" not in response.headers:
                    kind = JSON
                data = self._named(data) if kind.startswith(JSON) else data
                yield ForwardedChunk(data, kind, ignored, response.headers.get(ESTIMATED_HEADER, ""))
                return
            clock.wind(server.waits.first_token)
            async for part in self._events(server, response, clock):
                yield ForwardedChunk(part, kind, ignored)

    async def _events(
        self, server: Server, response: httpx.Response, clock: Clock
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(blocks_of(response)) as found:
            while (blocks := await clock.wait(anext(found, None))) is not None:
                said = [block for block in blocks if data_of(block)]
                if said:
                    clock.wind(server.waits.between)
                    with failing(server.name):
                        yield b"".join(self._named(block) + b"\n\n" for block in said)

    def _named(self, data: bytes) -> bytes:
        """Replace the model's name in JSON, or in an event, by the client's, and record the usage in it."""
        if b'"usage"' in data or b'"input_tokens"' in data:
            self._told(data)
        if self._model == self._route.model:
            return data
        theirs = re.escape(json.dumps(self._route.model).encode())
        ours = json.dumps(self._model).encode()
        # A quote within a text is escaped, so this matches fields only.
        return re.sub(rb'("model"\s*:\s*)' + theirs, lambda match: match[1] + ours, data)

    def _told(self, data: bytes) -> None:
        text = data if data[:1] == b"{" else data_of(data)
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return
        for place in (record, _of(record, "response"), _of(record, "message")):
            usage = _of(place, "usage")
            prompt = _count(usage, "input_tokens", "prompt_tokens", "total_tokens")
            made = _count(usage, "output_tokens", "completion_tokens")
            details = _of(usage, "input_tokens_details") or _of(usage, "prompt_tokens_details")
            cached = _count(details, "cached_tokens")
            # Anthropic counts the tokens that its cache had apart from the other tokens of the prompt.
            apart = _count(usage, "cache_read_input_tokens")
            prompt += apart + _count(usage, "cache_creation_input_tokens")
            if prompt or made:
                before, self.told = self.usage, True
                self.usage = TokenUsage(
                    prompt or before.prompt,
                    max(made, before.completion),
                    min(cached + apart, prompt) if prompt else before.cached,
                )


def forwarded_call(
    call: Mapping[str, Any], route: UpstreamRoute, prepared: Prepared, takes: frozenset[str]
) -> dict[str, Any]:
    """Return the body for an upstream. `takes`: the fields that the path takes there."""
    request = prepared.request
    made = {name: value for name, value in call.items() if name not in ("cache_salt", "kv_transfer_params")}
    made["model"] = route.model
    if "priority" in made or (route.priorities and request.priority and "priority" in takes):
        made["priority"] = request.priority
    if route.salts and request.tenant.salt and "cache_salt" in takes:
        made["cache_salt"] = request.tenant.salt
    return made


def _of(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, dict) else None


def _count(usage: Any, *names: str) -> int:
    found = (_of(usage, name) for name in names)
    return next((value for value in found if type(value) is int and 0 < value < 2**31), 0)
