"""Calls one server with OpenAI's interface: its list of models, whole answers, streamed answers."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.turns import in_turns
from nearfar.errors import RequestError
from nearfar.machine import NONCE_HEADER
from nearfar.remote.chunks import Chunk, ShapeError, Usage, read_chunk
from nearfar.remote.clock import Clock
from nearfar.remote.errors import (
    FewerAnswersError,
    RefusedError,
    RemoteError,
    briefly,
    error_of,
    event_error,
    unreachable,
)
from nearfar.remote.events import beginning, body, datas
from nearfar.remote.transport import fast_transport
from nearfar.remote.vectors import read_vectors

log = logging.getLogger(__name__)

CHAT, COMPLETIONS, EMBEDDINGS, MODELS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
)
PATHS = (MODELS, CHAT, COMPLETIONS, EMBEDDINGS)
"""The only paths that are ever requested."""
ANSWER_BYTES = 64 << 20
"""Largest whole answer in bytes: 256 embeddings of 8,192 numbers as text are smaller."""
LIST_BYTES, ERROR_BYTES = 1 << 20, 16 << 10
LISTED = 1000
"""Most models that are taken from a list."""
HELD_BYTES = 64 << 10
"""Most bytes of events without a part of an answer that wait for the first part before they are passed on."""
MAX_ID = 256
"""Most characters of a server's id of an answer that are kept."""
AFTER_END = 5.0
"""Seconds to wait for a stream's usage after the answer has ended."""


@dataclass(frozen=True)
class Waits:
    """Seconds to wait for a connection, for the first token (counted from the request), and for each later
    token.
    """

    connect: float = 5.0
    first_token: float = 30.0
    between: float = 30.0


@dataclass(frozen=True)
class Listed:
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
    """Return an address without /v1. Raises RequestError for an invalid one."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise RequestError(f"{url!r} is no address: {error}", "url") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RequestError(
            f"the address must begin with http:// or https:// and name a host, not {url!r}", "url"
        )
    return url.rstrip("/").removesuffix("/v1")


class Server:
    """Calls one server. Raises RefusedError where the server rejects the request as wrong, RemoteError where
    another server may do better.
    """

    def __init__(self, url: str, http: httpx.AsyncClient, waits: Waits) -> None:
        self.root, self._http, self.waits = root_of(url), http, waits
        self.name = str(httpx.URL(self.root).copy_with(userinfo=b""))
        """The address without a password, for messages."""

    async def models(self, seconds: float, nonce: str | None = None) -> tuple[Listed, ...]:
        """Return the models that the server lists. `nonce`: request a proof that it computes here
        (`nearfar.machine`).
        """
        headers = {} if nonce is None else {NONCE_HEADER: nonce}
        record = await self._whole("GET", MODELS, None, seconds, LIST_BYTES, headers)
        with self.failing():
            return _listed(record)

    async def post(
        self, path: str, call: Mapping[str, Any], seconds: float | None = None
    ) -> Mapping[str, Any]:
        """Return a whole answer."""
        return await self._whole("POST", path, call, seconds or self.waits.first_token, ANSWER_BYTES)

    async def embeddings(self, call: Mapping[str, Any], count: int) -> tuple[list[Vector], int]:
        """Return the vectors of `count` inputs, and the tokens of these."""
        clock = Clock(self.waits.first_token)
        async with self._response("POST", EMBEDDINGS, call, clock) as response:
            data = await clock.wait(body(response, ANSWER_BYTES))
            return await in_turns(read_vectors(data, count))

    async def stream(
        self,
        path: str,
        call: Mapping[str, Any],
        answers: int = 1,
        clock: Clock | None = None,
        passing: Passing | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield a streamed answer, or the `answers` answers of one call. Once all have their finish reason,
        no error is raised any more.

        `clock`: the clock of the stream, for a caller that may stop it. `passing`: the chunks have the events,
        to be passed on.
        """
        clock = clock or Clock(self.waits.first_token)
        clock.wind(self.waits.first_token)
        answer = _Answer(self, answers, path == CHAT, passing)
        call = {**call, "stream": True, "stream_options": {**_options(call, passing), "include_usage": True}}
        try:
            async with (
                self._response("POST", path, call, clock) as response,
                aclosing(datas(response)) as events,
            ):
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
            return _object(await clock.wait(body(response, limit)))

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        call: Mapping[str, Any] | None,
        clock: Clock,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Open a response without an error status, with its body yet to be read. Failures while it is open
        become RemoteError.
        """
        request = self._http.build_request(method, checked(self.root, path), json=call, headers=headers)
        with self.failing(), closing(clock):
            response = await clock.wait(self._http.send(request, stream=True))
            try:
                if response.is_error:
                    text = await beginning(response, ERROR_BYTES, self.waits.connect)
                    raise error_of(self.name, response.status_code, text, response.headers)
                yield response
            finally:
                await response.aclose()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Convert every failure of a server to RemoteError."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise RemoteError(f"{self.name}: {type(error).__name__}: {error}", "timeout") from error
        except TimeoutError as error:
            raise RemoteError(f"{self.name}: {error}", "timeout") from error
        except httpx.ConnectError as error:
            raise RemoteError(unreachable(self.name, error), "connection") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise RemoteError(f"{self.name}: {type(error).__name__}: {error}", "cut") from error
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"{self.name}: not the shape of an answer: {error}"[:500], "shape") from error


def checked(root: str, path: str) -> str:
    """Return the URL of an allowed path. Raises RequestError for another path."""
    if path not in PATHS:
        raise RequestError(f"{path} is not passed on", "path")
    return root + path


@dataclass(frozen=True)
class Passing:
    """How events are passed on. `model`: the name that the client uses, where the server has another. `usage`:
    the client asked for the usage. `options`: the client's other options of the stream.
    """

    model: str | None = None
    usage: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def _options(call: Mapping[str, Any], passing: Passing | None) -> Mapping[str, Any]:
    return {} if passing is None else passing.options


class _Answer:
    """Reads the events of one call: which answers have begun and ended, and what is passed on of them."""

    def __init__(self, server: Server, answers: int, chat: bool, passing: Passing | None) -> None:
        self._server, self._answers, self._chat, self._passing = server, answers, chat, passing
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._failure: Exception | None = None
        self._id = ""
        self._named = False
        self._held = b""  # events before the first part: until then another server may be asked

    @property
    def complete(self) -> bool:
        """Whether all answers have their finish reason."""
        return len(self._finished) == self._answers

    def read(self, found: Sequence[bytes]) -> Chunk:
        """Read events that came together. What is wrong with one is raised by `check`, when those before it were
        given.
        """
        parts: list[Piece] = []
        kept: list[bytes] = []
        usage: Usage | None = None
        try:
            with self._server.failing():
                for data in found:
                    record = _object(data)
                    chunk = self._chunk(record)
                    usage = chunk.usage or usage
                    if not self._named:
                        self._named = True
                        self._id = str(record.get("id") or "")[:MAX_ID]
                    if self._passing is not None and self._goes_on(record, chunk):
                        kept.append(self._event(record, data, self._passing))
                    if not self.complete:  # all that can come then is the usage
                        self._begun.update(part.index for part in chunk.parts)
                        self._finished.update(part.index for part in chunk.parts if part.finish is not None)
                        parts += chunk.parts
        except (RemoteError, RefusedError) as error:
            self._failure = error
        data = self._held + b"".join(kept)
        self._held = b"" if self._begun or len(data) > HELD_BYTES else data
        if self._held or not data:
            return Chunk(tuple(parts), usage)
        name, self._id = self._id, ""
        return Chunk(tuple(parts), usage, data, name)

    def check(self) -> None:
        """Raise the failure of the events read last."""
        if self._failure is not None:
            raise self._failure

    def check_end(self) -> None:
        """Raise an error where the stream has ended before its answers."""
        if self._finished and self._begun == self._finished and not self.complete:
            missing = sorted({*range(self._answers)} - self._finished)
            raise FewerAnswersError(self._server.name, self._answers, missing)
        if not self.complete:
            raise RemoteError(f"{self._server.name}: the stream ended before its answer", "cut")

    def _chunk(self, record: Mapping[str, Any]) -> Chunk:
        if record.get("error"):
            raise event_error(self._server.name, record["error"])
        chunk = read_chunk(record, chat=self._chat)
        if any(part.index >= self._answers for part in chunk.parts):
            raise ShapeError(
                f"a part of answer {max(part.index for part in chunk.parts)}, but {self._answers} were asked for"
            )
        return chunk

    def _goes_on(self, record: Mapping[str, Any], chunk: Chunk) -> bool:
        """Whether an event is passed on: a part of an answer, or the usage if the client asked for it."""
        assert self._passing is not None
        if record.get("choices"):
            return not self.complete
        return chunk.usage is None or self._passing.usage

    def _event(self, record: dict[str, Any], data: bytes, passing: Passing) -> bytes:
        """Return an event as it came, or with the client's name for the model."""
        if passing.model is not None:
            data = json.dumps({**record, "model": passing.model}, separators=(",", ":")).encode()
        elif b"\n" in data or b"\r" in data:
            data = json.dumps(record, separators=(",", ":")).encode()
        return b"data: " + data + b"\n\n"


def _object(text: bytes) -> dict[str, Any]:
    record = json.loads(text.decode())
    if not isinstance(record, dict):
        raise ShapeError(f"no object: {record!r:.80}")
    return record


def _listed(record: Mapping[str, Any]) -> tuple[Listed, ...]:
    data = record.get("data")
    if not isinstance(data, list) or not all(
        isinstance(item, dict) and isinstance(item.get("id"), str) for item in data
    ):
        raise ShapeError(f"{MODELS} lists no models: {data!r:.80}")
    return tuple(map(_model, data[:LISTED]))


def _model(item: Mapping[str, Any]) -> Listed:
    said = item.get("x_nearfar")
    said = said if isinstance(said, dict) else {}
    proof = said.get("proof")
    return Listed(
        item["id"],
        _context(item.get("max_model_len")),
        here=said.get("computes") == "here",
        proof=proof if isinstance(proof, str) else None,
    )


def _context(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None
