"""Calls one server with OpenAI's interface: its list of models, whole answers, streamed answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass, replace
from typing import Any

import httpx

from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.edge_runtime.turns import in_turns
from nearfar.errors import RequestError
from nearfar.machine import NONCE_HEADER
from nearfar.remote.answer import MAX_ID, AnswerEvents, Passing, failing, read_object
from nearfar.remote.chunks import ShapeError, StreamChunk, read_whole
from nearfar.remote.clock import Clock
from nearfar.remote.errors import (
    RefusedError,
    RemoteError,
    briefly,
    error_of,
    event_error,
)
from nearfar.remote.events import beginning, body, datas
from nearfar.remote.forms import Form
from nearfar.remote.merging import Merger
from nearfar.remote.openapi import ServerPath, listed_paths
from nearfar.remote.transport import fast_transport
from nearfar.remote.vectors import read_vectors

log = logging.getLogger(__name__)

CHAT, COMPLETIONS, EMBEDDINGS, MODELS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
)
IGNORED_HEADER = "x-nearfar-ignored"
"""The header in which a nearfar server names the fields of a request that it ignored."""
ESTIMATED_HEADER = "x-nearfar-estimated"
"""The header in which a nearfar server names the figures of an answer that are estimates."""
RESPONSES, MESSAGES, OPENAPI = "/v1/responses", "/v1/messages", "/openapi.json"
NATIVE = (
    RESPONSES, f"{RESPONSES}/input_tokens", MESSAGES, f"{MESSAGES}/count_tokens", "/v1/rerank", "/v2/rerank",
    "/v1/score", "/v1/classify", "/v1/decisions", "/v1/systemone", "/v1/tokenize", "/v1/detokenize",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
)  # fmt: skip
"""Paths that are requested as clients request them, of servers that list them in their OpenAPI
description.
"""
PATHS = (
    MODELS, OPENAPI, CHAT, COMPLETIONS, EMBEDDINGS, *NATIVE,
    *(path.removeprefix("/v1").removeprefix("/v2") for path in NATIVE),
)  # fmt: skip
"""The only paths that are ever requested."""
_CALLED = (
    *(path for path in PATHS if path.startswith(("/v1/", "/v2/"))), "/chat/completions", "/completions",
    "/embeddings", "/api/chat", "/api/generate", "/api/tags",
)  # fmt: skip
"""Ends of addresses that are not those of servers, longer ones first where one is the end of another."""
Heard = Callable[[Mapping[str, str]], object]
Paths = Mapping[str, ServerPath]
"""Paths of NATIVE that a server lists, each with its place on that server."""
ANSWER_BYTES = 64 << 20
"""Largest whole answer in bytes: 256 embeddings of 8,192 numbers as text are smaller."""
LIST_BYTES, ERROR_BYTES, OPENAPI_BYTES = 1 << 20, 16 << 10, 8 << 20
LISTED = 1000
"""Most models that are taken from a list."""
AFTER_END = 5.0
"""Seconds to wait for a stream's usage after the answer has ended."""


@dataclass(frozen=True)
class Waits:
    """Seconds to wait for a connection, for the first token (counted from the request), for each later token,
    and for an answer that the server does not stream.
    """

    connect: float = 5.0
    first_token: float = 30.0
    between: float = 30.0
    whole: float = 600.0


@dataclass(frozen=True)
class ListedModel:
    """A model that a server lists. `context`: tokens; None where it lists none. `here`: the server says that
    it computes the model itself; `proof`: its proof of that, if requested.
    """

    id: str
    context: int | None = None
    here: bool = False
    proof: str | None = None


def client(key: str | None, connect: float, *, direct: bool) -> httpx.AsyncClient:
    """Make the HTTP client for servers. `direct`: ignore the proxies that the environment names. Redirects
    are never followed.

    httpx limits only the connect time. The clock below limits the time of an answer, because httpx knows
    bytes and not tokens.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    timeout = httpx.Timeout(None, connect=connect)
    transport = fast_transport() if direct else None
    return httpx.AsyncClient(
        headers=headers, timeout=timeout, limits=limits, trust_env=not direct, follow_redirects=False,
        transport=transport,
    )  # fmt: skip


def root_of(url: str) -> str:
    """Return an address without /v1. Raises RequestError for an invalid one, and for that of a path that is
    called below it.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise RequestError(f"{url!r} is not an address: {error}", "url") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RequestError(
            f"the address must begin with http:// or https:// and name a host, not {url!r}", "url"
        )
    root = url.rstrip("/").removesuffix("/v1")
    if path := next((path for path in _CALLED if root.endswith(path)), ""):
        whole = str(parsed.copy_with(userinfo=b"")).rstrip("/")
        raise RequestError(
            f"{whole} is the address of one path: give the server's own address, {whole.removesuffix(path)}",
            "url",
        )
    return root


class Server:
    """Calls one server. Raises RefusedError where the server rejects the request as wrong, RemoteError where
    another server may do better.
    """

    def __init__(self, url: str, http: httpx.AsyncClient, waits: Waits) -> None:
        self.root, self._http, self.waits = root_of(url), http, waits
        self.name = str(httpx.URL(self.root).copy_with(userinfo=b""))
        """The address without a password, for messages."""

    async def models(self, seconds: float, nonce: str | None = None) -> tuple[ListedModel, ...]:
        """Return the models that the server lists. `nonce`: request a proof that it computes here
        (`nearfar.machine`).
        """
        headers = {} if nonce is None else {NONCE_HEADER: nonce}
        record = await self._whole("GET", MODELS, None, seconds, LIST_BYTES, headers)
        with failing(self.name):
            return _listed(record)

    async def paths(self, seconds: float) -> Paths:
        """Return the paths of NATIVE that the server lists."""
        record = await self._whole("GET", OPENAPI, None, seconds, OPENAPI_BYTES)
        with failing(self.name):
            return listed_paths(record, NATIVE)

    @asynccontextmanager
    async def forwarding(
        self, path: str, call: Mapping[str, Any] | Form, clock: Clock
    ) -> AsyncIterator[httpx.Response]:
        """Open the response to a request that is passed on as it is; its body is yet to be read."""
        async with self._response("POST", path, call, clock) as response:
            yield response

    async def post(
        self, path: str, call: Mapping[str, Any], seconds: float | None = None
    ) -> Mapping[str, Any]:
        """Return a whole answer."""
        return await self._whole("POST", path, call, seconds or self.waits.first_token, ANSWER_BYTES)

    async def embeddings(
        self, call: Mapping[str, Any], count: int, heard: Heard = lambda headers: None
    ) -> tuple[list[Vector], int]:
        """Return the vectors of `count` inputs, and the tokens of these. `heard` gets the headers."""
        clock = Clock(self.waits.first_token)
        async with self._response("POST", EMBEDDINGS, call, clock) as response:
            heard(response.headers)
            data = await clock.wait(body(response, ANSWER_BYTES))
            return await in_turns(read_vectors(data, count))

    async def stream(
        self,
        path: str,
        call: Mapping[str, Any],
        answers: int = 1,
        clock: Clock | None = None,
        passing: Passing | None = None,
        heard: Heard = lambda headers: None,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Yield a streamed answer, or the `answers` answers of one call. Once all have their finish reason,
        no error is raised any more.

        `clock`: the clock of the stream, for a caller that may stop it. `passing`: the chunks have the
        events, to be passed on. `heard` gets the answer's headers before its first chunk.
        """
        clock = clock or Clock(self.waits.first_token)
        clock.wind(self.waits.first_token)
        answer = AnswerEvents(self.name, answers, path == CHAT, passing)
        call = {
            **call,
            "stream": True,
            "stream_options": {**(passing.options if passing else {}), "include_usage": True},
        }
        try:
            async with (
                self._response("POST", path, call, clock) as response,
                aclosing(datas(response)) as events,
            ):
                heard(response.headers)
                while (found := await clock.wait(anext(events, None))) is not None:
                    chunk = answer.read(found)
                    if chunk.parts:
                        clock.wind(AFTER_END if answer.complete else self.waits.between)
                    if chunk.parts or chunk.usage or chunk.data:
                        yield chunk
                    answer.check()
            answer.check_end()
        except (RemoteError, RefusedError) as error:
            if not answer.complete:
                raise
            log.info("upstream %s, after the end of an answer: %s", self.name, briefly(error))

    async def whole(
        self,
        path: str,
        call: Mapping[str, Any],
        answers: int,
        clock: Clock,
        passing: Passing,
        heard: Heard,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Yield the answers of a call that is not streamed, for requests that servers do not stream.
        `passing`: how the answer is passed on. `heard` gets its headers.
        """
        clock.wind(self.waits.whole)
        async with self._response("POST", path, {**call, "stream": False}, clock) as response:
            heard(response.headers)
            record = read_object(await clock.wait(body(response, ANSWER_BYTES)))
            if record.get("error"):
                raise event_error(self.name, record["error"])
            chunk = read_whole(record, chat=path == CHAT)
            if sorted({part.index for part in chunk.parts}) != [*range(answers)]:
                raise ShapeError(f"{len(chunk.parts)} answers, but {answers} were asked for")
        yield replace(chunk, merger=Merger(passing.model, record), id=str(record.get("id") or "")[:MAX_ID])

    async def _whole(
        self,
        method: str,
        path: str,
        call: Mapping[str, Any] | None,
        seconds: float,
        limit: int,
        headers: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        clock = Clock(seconds)
        async with self._response(method, path, call, clock, headers) as response:
            return read_object(await clock.wait(body(response, limit)))

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        call: Mapping[str, Any] | Form | None,
        clock: Clock,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Open a response without an error status, with its body yet to be read. Failures while it is open
        become RemoteError.
        """
        url = checked(self.root, path)
        if isinstance(call, Form):
            request = self._http.build_request(
                method, url, content=call.data, headers={"Content-Type": call.type}
            )
        else:
            request = self._http.build_request(method, url, json=call, headers=headers)
        with failing(self.name), closing(clock):
            response = await clock.wait(self._http.send(request, stream=True))
            try:
                if not response.is_success:  # redirects are never followed
                    text = await beginning(response, ERROR_BYTES, self.waits.connect)
                    raise error_of(self.name, response.status_code, text, response.headers)
                yield response
            finally:
                await response.aclose()


def checked(root: str, path: str) -> str:
    """Return the URL of an allowed path. Raises RequestError for another path."""
    if path not in PATHS:
        raise RequestError(f"{path} is not passed on", "path")
    return root + path


def _listed(record: Mapping[str, Any]) -> tuple[ListedModel, ...]:
    data = record.get("data")
    if not isinstance(data, list) or not all(
        isinstance(item, dict) and isinstance(item.get("id"), str) for item in data
    ):
        raise ShapeError(f"{MODELS} lists no models: {data!r:.80}")
    return tuple(map(_model, data[:LISTED]))


def _model(item: Mapping[str, Any]) -> ListedModel:
    said = item.get("x_nearfar")
    said = said if isinstance(said, dict) else {}
    proof = said.get("proof")
    return ListedModel(
        item["id"],
        _context(item.get("max_model_len")),
        here=said.get("computes") == "here",
        proof=proof if isinstance(proof, str) else None,
    )


def _context(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None
