"""A hostile cloud over a real socket: whatever it sends, callers get answers or the project's errors, in
bounded memory.
"""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.errors import NearfarError
from nearfar.fallback_server.engines.base import EngineRequest
from nearfar.fallback_server.engines.upstream import UpstreamEngine, UpstreamOptions
from nearfar.fallback_server.http.shapes import ChatShape, CompletionShape, ResponseHead
from nearfar.fallback_server.http.writing import written
from nearfar.remote.events import EVENT_BYTES
from nearfar.routing import AsyncHybridClient, Endpoint, Policy
from nearfar.routing.policy import BreakerOptions, RetryOptions, Timeouts
from tests.fuzz.effort import effort
from tests.support.clouds import DONE, STREAM, Cloud, Json, event, listing, reply, said, usage

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
BODY: Json = {"model": "m", "messages": HELLO}
OPTIONS = UpstreamOptions(
    attempts=1, failures=10**9, probe_seconds=3600, first_token_timeout=10, between_timeout=10
)
POLICY = Policy(
    mode="cloud_only",
    retry=RetryOptions(attempts=0),
    breaker=BreakerOptions(failures=10**9),
    timeouts=Timeouts(first_token=10, between=10),
)
LOGPROB = {
    "token": "a",
    "logprob": -0.1,
    "bytes": [97],
    "top_logprobs": [{"token": "b", "logprob": -2.5, "bytes": None}],
}
CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WHOLE = (
    b": hello\n\n"
    + said("Grüße \U0001f98a", logprobs=None)
    + said(reasoning_content="hm")
    + said(tool_calls=[CALL])
    + event({"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [LOGPROB]}}]})
    + said(finish="stop")
    + usage(3, 5)
    + DONE
)
LINES = [
    b"data:",
    b"data: {",
    b"\n",
    b"\r",
    b"\r\n",
    b":",
    b"id: \0",
    b"retry: x",
    b"\xff",
    b"\xef\xbb\xbf",
    b"[DONE]",
    b"event: error",
    said("a"),
    said(finish="stop"),
    b'{"error": 1}',
    b"[" * 5000,
]


class Rig:
    """A hostile cloud, and both callers of clouds: the hybrid client, and the server's engine for
    upstreams.
    """

    def __init__(self) -> None:
        self.reply: Iterable[bytes] = ()
        self.cloud = Cloud(lambda path, body: self.reply)
        self.runner = asyncio.Runner()
        self.reply = [listing("m")]
        endpoint = Endpoint(self.cloud.address, model="m", context=4096)
        self.engine, self.hybrid = self.runner.run(self._open(endpoint))

    async def _open(self, endpoint: Endpoint) -> tuple[UpstreamEngine, AsyncHybridClient]:
        engine = await UpstreamEngine.connect([self.cloud.address], OPTIONS)
        return engine, AsyncHybridClient(cloud=endpoint, policy=POLICY)

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.run(self.hybrid.close())
        self.runner.close()
        self.cloud.__exit__()

    def answers(self, *parts: bytes) -> list[str]:
        """The text that each caller gets, or the name of its error. Any other exception fails the test."""
        self.reply = parts
        return [
            self.runner.run(self._hybrid()),
            self.runner.run(self._upstream(chat=True)),
            self.runner.run(self._upstream(chat=False)),
        ]

    async def _hybrid(self) -> str:
        text = ""
        try:
            async for chunk in await self.hybrid.chat.completions.create(HELLO, stream=True):
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                json.dumps(chunk.model_dump(), ensure_ascii=False).encode()
        except NearfarError as error:
            return type(error).__name__
        return text

    async def _upstream(self, *, chat: bool) -> str:
        wanted = EngineRequest("1", "m", messages=tuple(HELLO), body=BODY)
        if not chat:
            wanted = replace(wanted, messages=(), prompts=("Hello",), body={"model": "m", "prompt": "Hello"})
        shape = (ChatShape if chat else CompletionShape)(ResponseHead("1", "m"))
        pieces: list[Piece] = []
        relay = await self.engine.submit(await self.engine.prepare(wanted))
        try:
            async for piece in relay.pieces():
                pieces.append(piece)
                "".join(written(shape.chunk(piece, relay.usage))).encode()
            "".join(written(shape.whole(pieces, relay.usage))).encode()
        except NearfarError as error:
            return type(error).__name__
        finally:
            await relay.aclose()
        return "".join(piece.text for piece in pieces)

    async def listed(self) -> None:
        await self.engine.ready()
        try:
            wanted = EngineRequest("2", "m", prompts=("a", "b"), max_tokens=0, pooling="mean")
            await self.engine.embed(await self.engine.prepare(wanted))
        except NearfarError:
            return


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["stop", "\ud83d", "x" * 3000, 0, 1, -1, 2**63]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def fields(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with some of these fields, or anything."""
    return st.fixed_dictionaries({}, optional=known) | values


logprob = fields(token=values, logprob=values, bytes=values, top_logprobs=values)
function = fields(name=st.just("f") | values, arguments=st.just("{}") | values)
calls = st.lists(fields(index=values, id=values, function=function), max_size=2) | values
delta = fields(content=st.just("a") | values, reasoning_content=values, tool_calls=calls, role=values)
older = fields(tokens=values, token_logprobs=values, top_logprobs=values)
logprobs = fields(content=st.lists(logprob, max_size=2) | values) | older
choice = fields(
    index=st.just(0) | values,
    delta=delta,
    text=values,
    finish_reason=values,
    logprobs=logprobs,
    token_ids=values,
)
counted = fields(
    prompt_tokens=st.just(3) | values, completion_tokens=st.just(3) | values, prompt_tokens_details=values
)
record = fields(choices=st.lists(choice, max_size=2) | values, usage=counted, error=st.none() | values)
models = fields(data=st.lists(fields(id=st.just("m") | values, max_model_len=values), max_size=3) | values)
errors = fields(message=values, param=values, code=values).map(
    lambda value: json.dumps({"error": value}).encode()
)
vectors = fields(data=st.lists(fields(index=values, embedding=values), max_size=3) | values, usage=counted)


def test_a_whole_answer_is_read(rig: Rig) -> None:
    assert rig.answers(STREAM + WHOLE)[:2] == ["Grüße \U0001f98aa", "Grüße \U0001f98aa"]


def test_a_cut_at_every_byte(rig: Rig) -> None:
    """A cut before the end of an answer is an error, a cut after it is not. Bytes that come in two parts are
    not a cut.

    Tests every second byte; `make fuzz` tests every byte.
    """
    end = WHOLE.index(b"\n\n", WHOLE.index(b'"stop"')) + 2
    for at in range(0, len(WHOLE), 2 if effort().max_examples == 100 else 1):
        rig.reply = [STREAM + WHOLE[:at]]
        found = [rig.runner.run(rig._hybrid()), rig.runner.run(rig._upstream(chat=True))]
        assert found == (["EngineError"] * 2 if at < end else ["Grüße \U0001f98aa"] * 2)
        rig.reply = [STREAM, WHOLE[:at], WHOLE[at:]]
        assert rig.runner.run(rig._upstream(chat=True)) == "Grüße \U0001f98aa"


@effort(60)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes(rig: Rig, data: bytes, headed: bool) -> None:
    rig.answers((STREAM if headed else b"") + data)


@effort(60)
@given(st.lists(st.sampled_from(LINES), max_size=12))
def test_any_lines(rig: Rig, lines: list[bytes]) -> None:
    rig.answers(STREAM, *lines)


@effort(150)
@given(st.lists(record, max_size=3))
def test_any_json(rig: Rig, records: list[Any]) -> None:
    """Records include values that JSON lacks but Python writes and reads: NaN, infinities, lone
    surrogates.
    """
    rig.answers(STREAM + b"".join(event(one) for one in records) + said(finish="stop") + DONE)


@effort(60)
@given(st.integers(100, 599), st.binary(max_size=60) | errors, st.text("0123456789.-enaif", max_size=6))
def test_any_status_and_error(rig: Rig, status: int, body: bytes, after: str) -> None:
    rig.answers(reply(f"{status} X", body, f"Retry-After: {after}"))


@effort(60)
@given(models, vectors)
def test_any_list_of_models_and_any_vectors(rig: Rig, listed: Any, embedded: Any) -> None:
    for answer in (listed, embedded):
        rig.reply = [reply("200 OK", json.dumps(answer))]
        rig.runner.run(rig.listed())
    rig.reply = [listing("m")]
    rig.runner.run(rig.engine._list())
    assert [model.id for model in rig.engine.models()] == ["m"]


@pytest.mark.parametrize("kind", ["line", "data lines", "comment", "error"])
def test_memory_is_bounded(rig: Rig, kind: str) -> None:
    """200 MB of any kind are not kept in memory."""
    mega = b"x" * 10**6
    part = {"line": mega, "data lines": b"data: x\n" * 10**5, "comment": b":" + mega, "error": mega}[kind]
    head = {"line": STREAM + b"data: ", "error": b"HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\n"}.get(
        kind, STREAM
    )
    rig.reply = (head if index == 0 else part for index in range(200))
    tracemalloc.start()
    try:
        assert rig.runner.run(rig._upstream(chat=True)) in ("EngineError", "RefusedError")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * EVENT_BYTES
