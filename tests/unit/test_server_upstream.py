"""The upstream engine in front of real servers, which are killed, busy, or wrong."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.errors import RequestError
from nearfar.fallback_server.engines.addresses import Address, AddressBook
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.engines.upstream import UpstreamEngine, UpstreamOptions
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.errors import problem_of
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.fallback_server.http.shapes import ChatShape, ResponseHead
from nearfar.fallback_server.http.writing import written
from nearfar.fallback_server.prefixes import BLOCKS, CHARACTERS
from nearfar.remote.breaker import Breaker, BreakerOptions
from nearfar.remote.chunks import read_part
from nearfar.remote.errors import RefusedError, error_of
from nearfar.remote.server import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    PATHS,
    ListedModel,
    Server,
    Waits,
    checked,
    client,
)
from tests.support.late import late
from tests.support.numpy_executor import NumpyExecutor
from tests.support.servers import MODEL, RunningServer, tiny_engine

openai = late("openai")

OPTIONS = UpstreamOptions(key="inner", continues=True, failures=1, open_seconds=0.5, probe_seconds=30)
LONG: dict[str, Any] = {"model": "front", "max_tokens": 300, "temperature": 0, "logit_bias": {"257": -100}}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


class Gate:
    """Holds up the steps of all servers, so that a test can act in the middle of an answer."""

    def __init__(self) -> None:
        self._left = math.inf
        self._changed = threading.Condition()

    def close_after(self, steps: int) -> None:
        """Let this many steps through."""
        self._let(steps)

    def open(self) -> None:
        self._let(math.inf)

    def _let(self, steps: float) -> None:
        with self._changed:
            self._left = steps
            self._changed.notify_all()

    def step(self) -> None:
        """Wait for permission to step."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._left > 0, 60)
            self._left -= 1


class Fleet:
    """Two servers with a key of their own, and a front before them."""

    def __init__(self, folder: Path, options: UpstreamOptions = OPTIONS, requests: int = 256) -> None:
        self.folder = folder
        if not (folder / "keys.json").exists():
            add_key(folder / "keys.json", Key("front", hashed("inner")))
        limits = ServerLimits(requests=requests)
        self._inner = AppOptions(limits, KeyStore(folder / "keys.json"))
        self.servers = [self.start(), self.start()]
        urls = [server.address + "/v1" for server in self.servers]
        self.front = RunningServer(lambda: UpstreamEngine.connect(urls, options, ("front",)))
        self.client = openai.OpenAI(
            base_url=f"{self.front.address}/v1", api_key="user", max_retries=0, timeout=60
        )

    def start(self) -> RunningServer:
        return RunningServer(lambda: tiny_engine(self.folder / "tokenizer"), self._inner)

    @property
    def engine(self) -> UpstreamEngine:
        engine = self.front.engine
        assert isinstance(engine, UpstreamEngine)
        return engine

    def serving(self) -> RunningServer:
        """The server that has a request under way."""
        for _ in range(500):
            for server in self.servers:
                if server.engine.stats().running:
                    return server
            time.sleep(0.01)
        raise AssertionError("no server has a request")

    def close(self) -> None:
        for server in [self.front, *self.servers]:
            server.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """A function that makes a fleet whose servers the test may kill."""
    made: list[Fleet] = []

    def make(options: UpstreamOptions = OPTIONS, **more: Any) -> Fleet:
        made.append(Fleet(tmp_path, options, **more))
        return made[0]

    yield make
    for fleet in made:
        fleet.close()


def states(fleet: Fleet, path: str) -> list[str]:
    return [address.breaker(path).state(time.monotonic()) for address in fleet.engine.book.addresses]


def direct(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.servers[1].address}/v1", api_key="inner")


def test_answers_are_those_of_the_upstream(fleet: Fleet) -> None:
    assert [model.id for model in fleet.client.models.list()] == ["front"]
    body = {**LONG, "max_tokens": 20}
    mine = fleet.client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **body)
    theirs = direct(fleet).chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=2, **{**body, "model": MODEL}
    )
    assert mine.choices[0].message.content == theirs.choices[0].message.content
    assert mine.choices[0].logprobs == theirs.choices[0].logprobs
    assert mine.model == "front"
    assert mine.usage is not None
    assert (mine.usage.prompt_tokens, mine.usage.completion_tokens) == (9, 20)
    two = fleet.client.completions.create(prompt=["a", "b"], n=2, **body)
    assert len({choice.index for choice in two.choices}) == 4


def test_ollamas_durations_behind_a_front(fleet: Fleet) -> None:
    asked = {"prompt": "Hello", "stream": False, "options": {"num_predict": 40, "seed": 1}}
    with httpx.Client(base_url=fleet.front.address, timeout=60) as http:
        told = http.post("/api/generate", json=asked).json()
    assert told["eval_count"] > 20
    assert told["eval_duration"] > 1_000_000, "20 steps take far more than 1 ms"
    assert told["prompt_eval_duration"] + told["eval_duration"] <= told["total_duration"]


def test_tool_calls_that_come_in_parts_are_put_together() -> None:
    """vLLM streams calls in this way: id and name first, then the arguments in parts."""
    deltas: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
            ],
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
        {"reasoning_content": "hm"},
    ]
    pieces = [read_part({"index": 0, "delta": delta}, chat=True) for delta in deltas]
    pieces.append(read_part({"index": 0, "delta": {}, "finish_reason": "tool_calls"}, chat=True))
    shape = ChatShape(ResponseHead("id", "m"))
    whole = json.loads("".join(written(shape.whole(pieces, TokenUsage(1)))))["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["reasoning_content"] == "hm"
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"])
             for call in whole["message"]["tool_calls"]]  # fmt: skip
    assert calls == [("c1", "f", '{"a": 1}'), ("c2", "g", "{}")]
    chunk = shape.chunk(pieces[1], TokenUsage(0))
    assert chunk is not None
    assert chunk["choices"][0]["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}


def test_refusals_are_passed_on_and_break_no_circuit(fleet: Fleet) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        fleet.client.completions.create(model="front", prompt="x" * 3000)
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        fleet.client.embeddings.create(model="front", input="x")
    assert states(fleet, COMPLETIONS) == states(fleet, EMBEDDINGS) == ["closed", "closed"]


OVERFLOW = "This model's maximum context length is 9 tokens."


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"object": "error", "message": "too large", "code": 400}, ("too large", None, "invalid_request")),
        ({"error": "too large", "error_type": "validation"}, ("too large", None, "invalid_request")),
        ({"detail": "too large"}, ("too large", None, "invalid_request")),
        ({"detail": [{"loc": ["body"], "msg": "a"}, {"msg": "b"}]}, ("a; b", None, "invalid_request")),
        ([{"error": {"message": "no", "code": 400}}], ("no", None, "invalid_request")),
        ({"error": {"message": "no", "param": "n", "code": "bad_n"}}, ("no", "n", "bad_n")),
        ({"error": {"message": "no", "code": "a b\n"}}, ("no", None, "invalid_request")),
        ({"error": {"message": OVERFLOW, "code": 400}}, (OVERFLOW, None, "context_length_exceeded")),
        (
            {"error": {"message": "no room", "type": "exceed_context_size_error", "n_ctx": 9}},
            ("no room", None, "context_length_exceeded"),
        ),
        ({"nothing": 1}, ("the server rejects the request (status 400)", None, "invalid_request")),
        ("<html>", ("the server rejects the request (status 400)", None, "invalid_request")),
    ],
)
def test_what_an_upstream_says_of_a_wrong_request_is_kept(
    body: Any, told: tuple[str, str | None, str]
) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    error = error_of("http://a", 400, text, {})
    assert isinstance(error, RefusedError)
    problem = problem_of(error)
    assert (problem.message, problem.param, problem.code) == told


@pytest.mark.parametrize(
    ("finish", "told"),
    [*((one, one) for one in ("stop", "length", "tool_calls", "content_filter", "abort")), ("eos", "stop")],
)
def test_why_an_upstreams_answer_ended_is_kept(finish: str, told: str) -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": finish}
    assert read_part(choice, chat=True).finish == told


def test_leaving_is_passed_on(fleet: Fleet) -> None:
    stream = fleet.client.completions.create(prompt="Hello", stream=True, **{**LONG, "max_tokens": 900})
    next(iter(stream))
    serving = fleet.serving()
    stream.close()
    for _ in range(500):
        if not serving.engine.stats().running and not fleet.engine.stats().running:
            break
        time.sleep(0.01)
    assert serving.engine.stats().running == 0
    assert fleet.engine.stats().running == 0


def test_an_admin_ends_a_relayed_request(fleet: Fleet) -> None:
    stream = fleet.client.completions.create(prompt="Hello", stream=True, **{**LONG, "max_tokens": 900})
    first = next(iter(stream))
    call = fleet.front.app.state.service.live[first.id]
    fleet.front.run(call.cancel)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"


def test_only_allowed_paths_and_only_our_key_go_out(fleet: Fleet) -> None:
    root = fleet.engine.book.addresses[0].server.root
    assert checked(root, PATHS[1]) == root + PATHS[1]
    with pytest.raises(RequestError, match="/admin/stats"):
        checked(root, "/admin/stats")
    with httpx.Client(base_url=fleet.front.address) as http:
        assert http.post("/v1/fine_tuning/jobs", json={}).status_code == 404
        assert http.get("/ready").status_code == 200
    # The client's own key would be rejected upstream, so the answer came with the front's key.
    assert openai.OpenAI(base_url=f"{fleet.front.address}/v1", api_key="other").completions.create(
        prompt="x", **{**LONG, "max_tokens": 1}
    )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The gate that all servers of the test step through."""
    made, run = Gate(), NumpyExecutor.run

    def gated(executor: NumpyExecutor, function: str, size: int) -> None:
        if function == "step":
            made.step()
        run(executor, function, size)

    monkeypatch.setattr(NumpyExecutor, "run", gated)
    yield made
    made.open()


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_killed_server_in_the_middle_of_a_stream(
    mortal: Callable[..., Fleet], gate: Gate, kind: str
) -> None:
    """Another server continues the answer where it stopped: greedily, the text is that of an uninterrupted
    answer.
    """
    fleet = mortal()
    create: Any = fleet.client.chat.completions.create if kind == "chat" else fleet.client.completions.create
    asked: dict[str, Any] = {"messages": HELLO} if kind == "chat" else {"prompt": "Hello"}
    # Printable ASCII only, so that the text so far is the same tokens again.
    bias = {str(token): -100 for token in [*range(94, 262 - 1)]}
    body = {**LONG, **asked, "logit_bias": bias}
    whole = create(**body)
    expected = whole.choices[0].message.content if kind == "chat" else whole.choices[0].text
    text, killed = "", False
    gate.close_after(100)
    for chunk in create(stream=True, **body):
        choice = chunk.choices[0]
        text += (choice.delta.content or "") if kind == "chat" else choice.text
        if len(text) > 20 and not killed:
            killed = True
            fleet.serving().cut()
            gate.open()
    assert killed
    assert text == expected
    assert len(text) == 300
    assert sum(each.continued for each in fleet.engine.counts.values()) == 1


def test_a_killed_server_without_continuation_is_an_error_event(
    mortal: Callable[..., Fleet], gate: Gate
) -> None:
    fleet = mortal(replace(OPTIONS, continues=False))
    gate.close_after(100)
    stream = fleet.client.completions.create(prompt="Hello", stream=True, **{**LONG, "max_tokens": 900})
    next(iter(stream))
    fleet.serving().cut()
    gate.open()
    with pytest.raises(openai.APIError, match="during the answer"):
        list(stream)
    # The other upstream answers the next request, after a retry before its first token if necessary.
    assert fleet.client.completions.create(prompt="Hello", **{**LONG, "max_tokens": 2}).choices[0].text


def test_before_the_first_token_another_address_is_tried_and_circuits_close_again(mortal: Any) -> None:
    fleet = mortal()
    port = fleet.servers[0].port
    fleet.servers[0].kill()
    texts = {fleet.client.completions.create(prompt="Hello", **{**LONG, "max_tokens": 5}).choices[0].text
             for _ in range(4)}  # fmt: skip
    assert len(texts) == 1
    first = next(
        address for address in fleet.engine.book.addresses if address.server.root.endswith(f":{port}")
    )
    assert first.breaker(COMPLETIONS).state(time.monotonic()) != "closed"
    fleet.servers[1].kill()
    with pytest.raises(openai.InternalServerError, match="no upstream server"):
        fleet.client.completions.create(prompt="Hello", **LONG)
    with httpx.Client(base_url=fleet.front.address) as http:
        assert http.get("/ready").status_code == 503


def test_busy_servers_are_passed_over_and_their_429_is_passed_on(mortal: Callable[..., Fleet]) -> None:
    fleet = mortal(requests=1)
    codes: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=fleet.front.address, timeout=60) as http:
            codes.append(http.post("/v1/completions", json={**LONG, "prompt": "Hello"}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes.count(200) >= 2
    assert set(codes) == {200, 429}


async def test_connecting_to_nothing_says_so_and_asks_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = await UpstreamEngine.connect(["http://127.0.0.1:1/v1/"], UpstreamOptions(connect_timeout=1))
    assert "none of http://127.0.0.1:1 lists a model" in caplog.text
    assert engine.models() == ()
    assert not await engine.ready()
    await engine.close()


def test_a_breaker_opens_tries_one_and_closes() -> None:
    breaker = Breaker(BreakerOptions(2, 10, 10))
    breaker.failure(0, "request")
    breaker.success("request")
    breaker.failure(0, "request")
    assert breaker.allows(0)
    breaker.failure(0, "request")
    assert (breaker.state(0), breaker.allows(0)) == ("open", False)
    assert breaker.begin(10) == "probe"
    assert (breaker.state(10), breaker.allows(10)) == ("half_open", False)
    breaker.abandoned("probe")
    assert breaker.begin(10) == "probe"
    breaker.failure(10, "probe")
    assert not breaker.allows(10)
    assert breaker.begin(20) == "probe", "the period did not grow: its bound is where it began"
    breaker.success("probe")
    assert (breaker.state(20), breaker.allows(20)) == ("closed", True)


async def test_least_loaded_with_affinity_for_known_beginnings() -> None:
    http = client(None, 1, direct=True)
    servers = [Server(f"http://{name}", http, Waits()) for name in "abc"]
    book = AddressBook(servers, BreakerOptions(1, 9, 9), slack=2, clock=lambda: 0.0)
    a, b, c = book.addresses
    for address in book.addresses:
        address.models = (ListedModel("m"),)
    system = "s" * CHARACTERS * 3

    def choose(prompt: str, *without: Address) -> Address | None:
        return book.choose(prompt, CHAT, "m", without)

    for number in range(5):  # the front remembers this many blocks, if it keeps all of them
        assert choose(f"{number}" * CHARACTERS * 16_384) is not None
    assert len(book.prefixes) == 5 * BLOCKS
    book.prefixes.clear()
    assert choose(system + "one") is a
    a.under_way = 2
    assert choose(system + "two") is a
    assert choose("short") is b
    a.under_way = 3
    assert choose(system + "three") is b  # `a` is too busy; from now on `b` knows the beginning
    a.under_way = 0
    assert choose(system + "four") is b
    b.breaker(CHAT).failure(0, "request")
    assert choose(system + "five") in (a, c)
    assert choose("x", a, c) is None
    assert book.choose("x", COMPLETIONS, "m", (a, c)) is b, "another path has a circuit of its own"
    assert book.choose("x", CHAT, "n") is None
    await http.aclose()
