"""The hybrid client over real parts: an edge engine here, the fallback server behind a proxy that fails as networks do.

Both sides run the same tiny model, so a greedy answer must be the same text wherever its parts come from.
"""

from __future__ import annotations

import asyncio
import json
import random
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nearfar.cli import typer_app
from nearfar.edge_runtime import AsyncEngine, Engine
from nearfar.edge_runtime.text import TextCodec
from nearfar.errors import ArtifactError, DeviceError, EngineError, OverloadError, RequestError
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.routing import AsyncHybridClient, Endpoint, HybridClient, Policy
from nearfar.routing.policy import BreakerOptions, MonitorOptions, RetryOptions, Timeouts
from nearfar.routing.power import Power
from nearfar.routing.shapes import ChatCompletion, Provenance
from nearfar.routing.speed import Speeds
from nearfar.routing.types import MODES
from tests.support import tiny
from tests.support.proxy import Proxy
from tests.support.servers import RunningServer, tiny_core, tiny_engine

# One token a byte, and only letters and blanks: text that is cut anywhere has the same tokens again.
_ALPHABET = tiny.tokenizer().get_vocab()
LETTERS = {token for char, token in _ALPHABET.items() if char in "abcdefghijklmnopqrstuvwxyzĠ"}
ASK: dict[str, Any] = {
    "max_tokens": 48, "temperature": 0, "repetition_penalty": 1.3,
    "logit_bias": {str(token): -100 for token in range(261) if token not in LETTERS},
}  # fmt: skip
HELLO: list[Any] = [{"role": "user", "content": "Tell me about the fox"}]
LOW = MonitorOptions(window=4, min_tokens=6, logprob=-0.001)
QUICK = Policy(retry=RetryOptions(base=0.01), timeouts=Timeouts(connect=2, first_token=10, between=10))
HARD: Callable[[str], float] = lambda prompt: 0.9 if "prove" in prompt else 0.1  # noqa: E731


def edge() -> AsyncEngine:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    return AsyncEngine(tiny_core(), TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256))


def lose_after(engine: AsyncEngine, steps: int) -> None:
    """The device is lost in that step, and works again after it."""
    executor: Any = engine.core.executor
    run, left = executor.run, steps

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            executor.run = run
            raise DeviceError("out of memory")
        return run(*args, **kwargs)

    executor.run = failing


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("tokenizer")
    made = RunningServer(lambda: tiny_engine(path))
    yield made
    made.close()


@pytest.fixture
def proxy(server: RunningServer) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.fixture
async def device() -> AsyncIterator[AsyncEngine]:
    async with edge() as engine:
        yield engine


class Rig:
    """Makes clients over the device and the proxied server."""

    def __init__(self, device: AsyncEngine, proxy: Proxy) -> None:
        self.device, self.proxy = device, proxy
        self.made: list[AsyncHybridClient] = []

    def client(self, policy: Policy = QUICK, **options: Any) -> AsyncHybridClient:
        cloud = Endpoint(self.proxy.address, model="tiny", price_in=1.0, price_out=3.0)
        options = {"device": self.device, "cloud": cloud, "difficulty": HARD, **options}
        self.made.append(AsyncHybridClient(policy=policy, **options))
        return self.made[-1]

    async def expected(self) -> str:
        """The answer without any trouble."""
        answer = await self.device.chat.completions.create(HELLO, **ASK)
        return answer.choices[0].message.content


@pytest.fixture
async def rig(device: AsyncEngine, proxy: Proxy) -> AsyncIterator[Rig]:
    made = Rig(device, proxy)
    yield made
    for client in made.made:
        await client.close()


async def streamed(client: AsyncHybridClient, messages: list[Any] = HELLO, **more: Any) -> tuple[str, list[Provenance]]:
    """The text of a stream, and what its chunks say of their origin."""
    text, told = "", []
    async for chunk in await client.chat.completions.create(messages, stream=True, **{**ASK, **more}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
        if chunk.x_nearfar is not None:
            told.append(chunk.x_nearfar)
    return text, told


def codes(told: Provenance) -> list[str]:
    return [reason.code for reason in told.reasons]


async def test_easy_stays_and_hard_goes(rig: Rig) -> None:
    client = rig.client()
    easy = await client.chat.completions.create(HELLO, **ASK)
    assert isinstance(easy, ChatCompletion)
    assert easy.choices[0].message.content == await rig.expected()
    assert (easy.x_nearfar.route, codes(easy.x_nearfar), rig.proxy.connections) == ("device", ["easy"], 0)
    assert (easy.x_nearfar.spent, easy.x_nearfar.saved) == (0.0, float(easy.usage.total_tokens))
    hard = await client.chat.completions.create([{"role": "user", "content": "prove it"}], **ASK)
    assert (hard.x_nearfar.route, codes(hard.x_nearfar), rig.proxy.connections) == ("cloud", ["hard"], 1)
    assert (hard.x_nearfar.spent, hard.x_nearfar.saved) == (float(hard.usage.total_tokens), 0.0)
    assert hard.usage.completion_tokens == 48
    assert not hard.x_nearfar.degraded


async def test_both_sides_give_one_text_and_chunks_tell_their_origin_first_and_last(rig: Rig) -> None:
    client, expected = rig.client(), await rig.expected()
    for mode in ("prefer_device", "prefer_cloud"):
        chunks = [chunk async for chunk in await client.chat.completions.create(
            HELLO, stream=True, stream_options={"include_usage": True}, x_nearfar={"mode": mode}, **ASK)]  # fmt: skip
        told = [index for index, chunk in enumerate(chunks) if chunk.x_nearfar is not None]
        assert told == [0, len(chunks) - 2, len(chunks) - 1]
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == expected
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 48
        assert chunks[0].x_nearfar is not None
        assert chunks[0].x_nearfar.decision_id == chunks[-1].x_nearfar.decision_id  # type: ignore[union-attr]


async def test_a_prompt_too_long_for_the_device_goes(rig: Rig) -> None:
    class Small(AsyncEngine):
        pass

    small = Small(tiny.core(), rig.device.codec)  # 160 tokens of context
    async with small:
        client = rig.client(device=small)
        long = [{"role": "user", "content": "fox " * 60}]
        answer = await client.chat.completions.create(long, **ASK)
        assert answer.x_nearfar.route == "cloud"
        assert "context" in codes(answer.x_nearfar)
        with pytest.raises(RequestError, match=r"device context.*cloud private"):
            await client.chat.completions.create(long, x_nearfar={"private": True}, **ASK)


async def test_tools_and_formats_go_to_who_can(rig: Rig) -> None:
    client = rig.client()
    answer = await client.chat.completions.create(
        HELLO, max_tokens=40, temperature=0, response_format={"type": "regex", "regex": "[a-z]{4}"}
    )
    assert (answer.x_nearfar.route, len(answer.choices[0].message.content or "")) == ("cloud", 4)
    tool = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
    called = await client.chat.completions.create(HELLO, tools=[tool], tool_choice="required", max_tokens=300, temperature=0)
    assert called.choices[0].message.tool_calls is not None
    assert called.choices[0].message.tool_calls[0].function.name == "go"
    assert called.choices[0].finish_reason in ("tool_calls", "length"), "a random model may add blanks for long"


async def test_the_cloud_is_down_and_the_device_answers_degraded(rig: Rig) -> None:
    client = rig.client(replace(QUICK, breaker=BreakerOptions(failures=2, seconds=60)))
    rig.proxy.down = True
    for attempt in range(3):
        text, told = await streamed(client, x_nearfar={"mode": "prefer_cloud"})
        assert text == await rig.expected()
        assert (told[-1].route, told[-1].degraded) == ("device", True)
        assert ("failed" if attempt < 2 else "breaker_open") in codes(told[-1])
    assert rig.proxy.connections == 2, "an open breaker asks nobody"
    with pytest.raises(OverloadError, match="breaker_open") as raised:
        await client.chat.completions.create(HELLO, x_nearfar={"mode": "cloud_only"}, **ASK)
    assert 50 < raised.value.retry_after <= 60


CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":%s},"finish_reason":%s}]}\n\n'


class Odd:
    """A server that answers every request with the same bytes, and waits before it closes."""

    def __init__(self, status: str, body: str, wait: float = 0.0) -> None:
        answer = f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{body}".encode()
        self.requests: list[bytes] = []

        class Handler(socketserver.StreamRequestHandler):
            def handle(handler) -> None:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += handler.rfile.readline()
                length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                self.requests.append(head + handler.rfile.read(length))
                handler.wfile.write(answer)
                handler.wfile.flush()
                time.sleep(wait)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Odd:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize(("status", "body", "wait", "code"), [
    ("401 Unauthorized", '{"error": {"message": "no such key"}}', 0, "401"),
    ("500 Oops", "<html>", 0, "500"),
    ("503 Busy\r\nRetry-After: 7", "", 0, "503"),
    ("302 Found\r\nLocation: http://127.0.0.1:9/", "", 0, "cut"),
    ("200 OK", "<html>sign in to the network</html>", 0, "cut"),
    ("200 OK", "data: not json\n\n", 0, "shape"),
    ("200 OK", 'data: {"choices": 7}\n\n', 0, "shape"),
    ("200 OK", 'data: {"error": {"message": "overloaded"}}\n\n', 0, "error"),
    ("200 OK", "", 0.8, "timeout"),
])  # fmt: skip
async def test_whatever_a_cloud_answers_the_device_answers_better(rig: Rig, status: str, body: str, wait: float, code: str) -> None:
    with Odd(status, body, wait) as odd:
        policy = replace(QUICK, mode="prefer_cloud", timeouts=Timeouts(connect=2, first_token=0.3 if wait else 20))
        client = rig.client(policy, cloud=Endpoint(odd.address, model="m", key="secret"))
        text, told = await streamed(client)
        assert (text, told[-1].route, told[-1].degraded) == (await rig.expected(), "device", True)
        assert [(reason.code, reason.value) for reason in told[-1].reasons[1:]] == [("failed", code)]
        assert (told[-1].spent, len(odd.requests)) == (0.0, 1)
        assert b"Bearer secret" in odd.requests[0]
        assert "secret" not in repr(client.router.cloud.endpoint)  # type: ignore[union-attr]
        _, told = await streamed(client)
        assert ("retry_after" in codes(told[-1])) == (code == "503")


async def test_a_cloud_that_cannot_continue_is_not_asked_to(rig: Rig) -> None:
    """A vendor without continue_final_message gets whole requests only."""
    expected = await rig.expected()
    cloud = Endpoint(rig.proxy.address, model="tiny", continues=False)
    client = rig.client(replace(QUICK, escalation="continue", monitor=LOW), cloud=cloud)
    text, told = await streamed(client)
    assert (text, told[-1].path, told[-1].degraded) == (expected, ["device"], True)
    lose_after(rig.device, 12)
    with pytest.raises(EngineError, match=r"after \d+ tokens"):
        await streamed(client, x_nearfar={"mode": "prefer_device"})
    lose_after(rig.device, 0)
    _, told = await streamed(client, x_nearfar={"mode": "prefer_device"})
    assert told[-1].path == ["cloud"], "nothing was shown yet"


async def test_a_stream_that_stops_coming_is_taken_over(rig: Rig) -> None:
    expected = await rig.expected()
    body = "".join(CHUNK % (json.dumps(char), "null") for char in expected[:10])
    with Odd("200 OK", body, 0.8) as odd:
        policy = replace(QUICK, mode="prefer_cloud", timeouts=Timeouts(connect=2, first_token=5, between=0.2))
        text, told = await streamed(rig.client(policy, cloud=Endpoint(odd.address, model="m")))
        assert (text, told[-1].path) == (expected, ["cloud", "device"])
        assert (told[-1].reasons[-1].code, told[-1].reasons[-1].value) == ("cut", "timeout")
        assert told[-1].spent is not None
        assert told[-1].spent > 10, "what was given is paid for"


async def test_cloud_only_retries_and_then_tells_why(rig: Rig) -> None:
    client = rig.client(replace(QUICK, mode="cloud_only"))
    rig.proxy.down = True
    with pytest.raises(EngineError, match="the cloud failed, and nothing else can answer"):
        await client.chat.completions.create(HELLO, **ASK)
    assert rig.proxy.connections == 3, "one call and two retries"


async def test_the_retry_budget_is_shared(rig: Rig) -> None:
    retry = RetryOptions(base=0.01, burst=1, ratio=0.0)
    client = rig.client(replace(QUICK, mode="cloud_only", retry=retry, breaker=BreakerOptions(failures=100)))
    rig.proxy.down = True
    for _ in range(3):
        with pytest.raises(EngineError):
            await client.chat.completions.create(HELLO, **ASK)
    assert rig.proxy.connections == 4


async def test_busy_with_retry_after(rig: Rig, tmp_path: Path) -> None:
    busy = RunningServer(lambda: tiny_engine(tmp_path), AppOptions(ServerLimits(requests=0)))
    try:
        cloud = Endpoint(busy.address, model="tiny")
        client = rig.client(replace(QUICK, mode="prefer_cloud"), cloud=cloud)
        text, told = await streamed(client)
        assert (text, told[-1].degraded, told[-1].reasons[-1].value) == (await rig.expected(), True, "429")
        _, told = await streamed(client)
        assert codes(told[-1]) == ["preferred", "retry_after"], "the cloud is left alone for as long as it asked"
        alone = rig.client(replace(QUICK, mode="cloud_only", retry=RetryOptions(max_wait=0.1)), cloud=cloud)
        with pytest.raises(OverloadError, match="429"):
            await alone.chat.completions.create(HELLO, **ASK)
    finally:
        busy.close()


@pytest.mark.parametrize("steps", [1, 2, 9, 30])
async def test_the_device_is_lost_in_mid_stream_and_the_cloud_goes_on(rig: Rig, steps: int) -> None:
    expected = await rig.expected()
    lose_after(rig.device, 2 * steps)  # a step and its sampling
    text, told = await streamed(rig.client())
    assert text == expected
    assert (told[-1].route, told[-1].degraded) == ("cloud", False)
    assert told[-1].path[-1] == "cloud"
    assert told[-1].reasons[-1].code in ("cut", "failed")


async def test_a_device_that_stands_still_is_lost(rig: Rig) -> None:
    expected = await rig.expected()
    executor: Any = rig.device.core.executor
    run, left = executor.run, 20
    waiting = threading.Event()

    def standing(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            waiting.wait(5)
        return run(*args, **kwargs)

    executor.run = standing
    client = rig.client(replace(QUICK, timeouts=replace(QUICK.timeouts, device_between=0.2)))
    text, told = await streamed(client)
    waiting.set()
    assert (text, told[-1].path, told[-1].reasons[-1].value) == (expected, ["device", "cloud"], "stalled")


async def test_a_device_that_fails_again_and_again_is_left_alone_but_for_private_requests(rig: Rig) -> None:
    client = rig.client()
    for _ in range(2):
        lose_after(rig.device, 0)
        _, told = await streamed(client)
        assert told[-1].path == ["cloud"]
    _, told = await streamed(client)
    assert [(reason.code, reason.value) for reason in told[-1].reasons] == [("unavailable", "failed lately")]
    _, told = await streamed(client, x_nearfar={"private": True})
    assert told[-1].path == ["device"]


async def test_the_device_is_lost_during_a_private_request_and_nobody_else_hears_of_it(rig: Rig) -> None:
    client = rig.client()
    lose_after(rig.device, 12)
    with pytest.raises(EngineError, match="out of memory"):
        await client.chat.completions.create(HELLO, x_nearfar={"private": True}, **ASK)
    assert rig.proxy.connections == 0


@pytest.mark.parametrize("after_cut", ["device", "cloud"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
async def test_the_cloud_is_cut_in_mid_stream(rig: Rig, share: float, after_cut: Any) -> None:
    expected = await rig.expected()
    client = rig.client(replace(QUICK, mode="prefer_cloud", after_cut=after_cut))
    rig.proxy.cut_after = int(share * 48 * 190)
    text, told = await streamed(client)
    assert rig.proxy.cut_after is None, "the cut must happen"
    assert text == expected
    assert told[-1].route == after_cut
    assert told[-1].degraded == (after_cut == "device")
    assert "cut" in codes(told[-1])


async def test_a_structured_answer_is_not_continued(rig: Rig) -> None:
    client = rig.client(replace(QUICK, mode="prefer_cloud"))
    rig.proxy.cut_after = 3000
    with pytest.raises(EngineError, match=r"after \d+ tokens"):
        await client.chat.completions.create(
            HELLO, max_tokens=80, temperature=0, response_format={"type": "regex", "regex": "[a-z]{80}"}
        )


async def test_escalation_continues_or_restarts_and_shows_nothing_twice(rig: Rig) -> None:
    expected = await rig.expected()
    text, told = await streamed(rig.client(replace(QUICK, escalation="continue", monitor=LOW)))
    assert text == expected
    assert told[-1].path == ["device", "cloud"]
    assert "low_logprob" in codes(told[-1])
    held = replace(QUICK, escalation="restart", hold_tokens=8, monitor=LOW)
    text, told = await streamed(rig.client(held))
    assert (text, told[-1].path) == (expected, ["cloud"])
    late = replace(QUICK, escalation="restart", hold_tokens=3, monitor=LOW)
    text, told = await streamed(rig.client(late))
    assert (text, told[-1].path) == (expected, ["device", "cloud"]), "what is shown stays"
    whole = await rig.client(replace(QUICK, escalation="restart", monitor=LOW)).chat.completions.create(HELLO, **ASK)
    assert (whole.choices[0].message.content, whole.x_nearfar.path) == (expected, ["cloud"])
    assert whole.choices[0].logprobs is None, "nobody asked for them"
    content = replace(QUICK, escalation="restart", monitor=replace(LOW, logprob=-100.0, entropy=100.0))
    whole = await rig.client(content).chat.completions.create(HELLO, logprobs=True, top_logprobs=2, **ASK)
    assert (whole.choices[0].message.content, whole.x_nearfar.path) == (expected, ["device"])
    assert whole.choices[0].logprobs is not None
    assert [len(item.top_logprobs) for item in whole.choices[0].logprobs.content] == [2] * 48


async def test_escalation_without_a_cloud_goes_on_here(rig: Rig) -> None:
    rig.proxy.down = True
    client = rig.client(replace(QUICK, escalation="continue", monitor=LOW))
    text, told = await streamed(client)
    assert text == await rig.expected()
    assert (told[-1].route, told[-1].degraded) == ("device", True)
    private, told = await streamed(client, x_nearfar={"private": True})
    assert (private, codes(told[-1])) == (text, ["private"])


async def test_hedging_keeps_the_first_and_stops_the_other(rig: Rig) -> None:
    expected = await rig.expected()
    client = rig.client(replace(QUICK, hedge_seconds=0.0))
    text, told = await streamed(client)
    assert text == expected
    assert codes(told[-1])[-1] == "hedged"
    assert rig.proxy.connections <= 1, "the device may win before there is a connection"
    assert len(told[-1].path) == 1
    for _ in range(12):
        if not rig.device.core.scheduler.running and not rig.device.core.scheduler.waiting:
            break
        await asyncio.sleep(0.01)
    assert not rig.device.core.scheduler.running
    rig.proxy.down = True
    text, told = await streamed(client)
    assert (text, told[-1].route) == (expected, "device")


async def test_shadow_answers_here_and_tells_what_it_would_have_done(rig: Rig, tmp_path: Path) -> None:
    client = rig.client(replace(QUICK, shadow="device"), records=tmp_path / "log.jsonl")
    answer = await client.chat.completions.create([{"role": "user", "content": "prove it"}], **ASK)
    assert (answer.x_nearfar.route, answer.x_nearfar.would_route, rig.proxy.connections) == ("device", "cloud", 0)
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert record["would"]["reasons"][0]["code"] == "hard"
    assert (record["outcome"]["route"], record["outcome"]["finish"]) == ("device", "length")


async def test_records_have_text_only_where_it_is_allowed(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    await rig.client(records=path).chat.completions.create(HELLO, **ASK)
    allowed = rig.client(replace(QUICK, record_text=True), records=path)
    await allowed.chat.completions.create(HELLO, **ASK)
    await allowed.chat.completions.create(HELLO, x_nearfar={"private": True}, **ASK)
    lines = path.read_text().splitlines()
    assert ["fox" in line for line in lines] == [False, True, False]
    assert json.loads(lines[1])["text"]["answer"] == await rig.expected()


async def test_records_are_summed_up(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    client = rig.client(records=path)
    for words, more in (("fox", {}), ("cat", {"x_nearfar": {"private": True}}), ("fox", {"x_nearfar": {"mode": "cloud_only"}})):
        await client.chat.completions.create([{"role": "user", "content": words}], **more, **ASK)
    rig.proxy.down = True
    await client.chat.completions.create(HELLO, x_nearfar={"mode": "prefer_cloud"}, **ASK)
    with pytest.raises(RequestError, match="neither the device nor the cloud"):
        await client.chat.completions.create([{"role": "user", "content": "fox " * 900}], x_nearfar={"private": True}, **ASK)
    done = CliRunner().invoke(typer_app, ["route", "log", str(path), "--json"])
    assert done.exception is None, done.exception
    found = json.loads(done.stdout)
    assert {name: found[name] for name in ("requests", "device", "cloud", "degraded", "private", "failed")} == {
        "requests": 5, "device": 3, "cloud": 1, "degraded": 1, "private": 2, "failed": 1,
    }  # fmt: skip
    assert found["reasons"]["easy"] == 1
    assert found["spent"] > 0
    assert found["median_ttft_cloud"] > 0
    path.write_text(path.read_text() + "{}\n")
    assert isinstance(CliRunner().invoke(typer_app, ["route", "log", str(path)]).exception, RequestError)


async def test_budgets_hold_also_for_requests_at_once_and_from_start_to_start(rig: Rig, tmp_path: Path) -> None:
    policy = replace(QUICK, mode="prefer_cloud", budget_day=200)  # an answer costs some 70 tokens
    client = rig.client(policy, state=tmp_path / "state.json")
    answers = await asyncio.gather(*(client.chat.completions.create(HELLO, **ASK) for _ in range(4)))
    routes = sorted(str(answer.x_nearfar.route) for answer in answers)
    assert routes == ["cloud", "cloud", "device", "device"]
    assert {code for answer in answers for code in codes(answer.x_nearfar)} == {"preferred", "budget_day"}
    await client.close()
    kept = json.loads((tmp_path / "state.json").read_text())
    assert kept["ledger"]["spent"] == sum(answer.x_nearfar.spent or 0 for answer in answers) > 100
    again = rig.client(policy, state=tmp_path / "state.json")
    answer = await again.chat.completions.create(HELLO, **ASK)
    assert (answer.x_nearfar.route, answer.x_nearfar.degraded) == ("device", True)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(RequestError, match="not a routing state"):
        rig.client(policy, state=tmp_path / "state.json")


async def test_a_conversation_has_its_budget_and_money_is_a_unit(rig: Rig) -> None:
    client = rig.client(replace(QUICK, mode="prefer_cloud", budget_unit="money", budget_conversation=0.0003))
    mine = {"x_nearfar": {"conversation": "a"}}
    first = await client.chat.completions.create(HELLO, **mine, **ASK)
    cost = (first.usage.prompt_tokens * 1.0 + first.usage.completion_tokens * 3.0) / 1e6
    assert first.x_nearfar.spent == pytest.approx(cost)
    second = await client.chat.completions.create(HELLO, **mine, **ASK)
    assert (second.x_nearfar.route, "budget_conversation" in codes(second.x_nearfar)) == ("device", True)
    other = await client.chat.completions.create(HELLO, extra_body={"x_nearfar": {"conversation": "b"}}, **ASK)
    assert other.x_nearfar.route == "cloud"


async def test_leaving_a_stream_stops_it_and_gives_its_place_back(rig: Rig, tmp_path: Path) -> None:
    client = rig.client(replace(QUICK, mode="prefer_cloud", budget_day=1000), state=tmp_path / "state.json")
    stream = await client.chat.completions.create(HELLO, stream=True, **{**ASK, "max_tokens": 900})
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    answer = await client.chat.completions.create(HELLO, **ASK)
    assert answer.x_nearfar.route == "cloud", "what the first did not use is free again"
    unread = await client.chat.completions.create(HELLO, stream=True, **{**ASK, "max_tokens": 700})
    await unread.close()
    answer = await client.chat.completions.create(HELLO, **ASK)
    assert answer.x_nearfar.route == "cloud"
    here = await client.chat.completions.create(HELLO, stream=True, x_nearfar={"mode": "device_only"}, **{**ASK, "max_tokens": 900})
    await here.close()
    assert not rig.device.core.scheduler.running


async def test_a_cancelled_task_stops_both_sides(rig: Rig) -> None:
    client = rig.client(replace(QUICK, hedge_seconds=0.0))
    for wait in (0.0, 0.01, 0.05, 0.1):
        task = asyncio.create_task(client.chat.completions.create(HELLO, **{**ASK, "max_tokens": 900}))
        await asyncio.sleep(wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not rig.device.core.scheduler.running
    assert client.router._ledger.spent_day("another day") == 0, "a reservation was left behind"
    assert client.router._breakers["cloud"].state(time.monotonic()) == "closed"


async def test_an_artifact_is_not_loaded_for_the_cloud_alone(rig: Rig) -> None:
    client = rig.client(device="/no/such/artifact")
    answer = await client.chat.completions.create(HELLO, x_nearfar={"mode": "cloud_only"}, **ASK)
    assert answer.x_nearfar.route == "cloud"
    with pytest.raises(ArtifactError, match="does not exist"):
        await client.chat.completions.create(HELLO, **ASK)


async def test_the_threshold_follows_its_share_and_is_kept(rig: Rig, tmp_path: Path) -> None:
    policy = replace(QUICK, target_share=0.0)
    client = rig.client(policy, state=tmp_path / "s.json")
    hard = [{"role": "user", "content": "prove it"}]
    routes = [(await client.chat.completions.create(hard, **{**ASK, "max_tokens": 1})).x_nearfar.route for _ in range(9)]
    assert routes[0] == "cloud"
    assert routes[-1] == "device", "a share of nothing closes the cloud in the end"
    await client.close()
    kept = json.loads((tmp_path / "s.json").read_text())
    assert kept["threshold"]["seen"] == 9
    assert kept["threshold"]["threshold"] > 0.9
    assert kept["speeds"]["cloud"]["round_trip"] > 0


async def test_a_conversation_stays_where_its_cache_is_warm(rig: Rig) -> None:
    client = rig.client(replace(QUICK, ttft=None, escalation="off"))
    assert client.router.device is not None
    client.router.device.speeds.prefill_tps = 10.0  # a slow device
    mine = {"x_nearfar": {"conversation": "a"}}
    turns = [{"role": "user", "content": "prove it"}]
    first = await client.chat.completions.create(turns, **mine, **ASK)
    assert first.x_nearfar.route == "cloud"
    turns += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "and then " * 10}]
    second = await client.chat.completions.create(turns, **mine, **ASK)
    assert (second.x_nearfar.route, codes(second.x_nearfar)) == ("cloud", ["sticky"])
    stranger = await client.chat.completions.create(turns, **ASK)
    assert stranger.x_nearfar.route == "device"
    third = await client.chat.completions.create(turns, **mine, **ASK)
    assert (third.x_nearfar.route, codes(third.x_nearfar)) == ("device", ["easy"]), "the device's cache is warm by now"


async def test_slow_devices_and_empty_batteries_send_work_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = rig.client(replace(QUICK, completion=1.0))
    assert client.router.device is not None
    client.router.device.speeds = Speeds(prefill_tps=10.0, decode_tps=10.0)
    answer = await client.chat.completions.create(HELLO, **ASK)
    assert (answer.x_nearfar.route, codes(answer.x_nearfar)) == ("cloud", ["slow_ttft", "slow_total"])
    empty = rig.client()
    monkeypatch.setattr("nearfar.routing.router.power", lambda: Power(0.05, False))
    answer = await empty.chat.completions.create(HELLO, **ASK)
    assert (answer.x_nearfar.route, codes(answer.x_nearfar)) == ("cloud", ["battery"])
    monkeypatch.setattr("nearfar.routing.router.power", lambda: Power(0.05, True))
    assert (await empty.chat.completions.create(HELLO, **ASK)).x_nearfar.route == "device"


def test_the_decision_needs_no_library_and_the_client_names_what_is_missing() -> None:
    script = (
        "import sys; sys.modules['httpx'] = None; import nearfar.routing as r\n"
        "assert r.decide and r.Policy() and not {'numpy', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "import nearfar.routing.difficulty, nearfar.routing.ledger, nearfar.routing.confidence, nearfar.routing.retry\n"
        "assert not {'numpy', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "try: r.HybridClient\nexcept ImportError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("the hybrid client needs httpx: pip install 'nearfar[routing]'\n", "")


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_fails_when_the_text_is_whole_or_an_error_tells_and_nothing_comes_twice(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    expected = await rig.expected()
    policy = replace(
        QUICK, mode=rng.choice(MODES), after_cut=rng.choice(["device", "cloud"]), hold_tokens=rng.choice([0, 10]),
        breaker=BreakerOptions(rng.choice([1, 3]), 0.05, 0.05), device_breaker=BreakerOptions(1, 0.05, 0.05),
        retry=RetryOptions(base=0.01, before_fallback=rng.choice([0, 1])),
    )  # fmt: skip
    watched: dict[str, Any] = {"escalation": rng.choice(["continue", "restart"]), "monitor": LOW}
    client = rig.client(replace(policy, **rng.choice([{}, {"hedge_seconds": 0.0}, watched])))
    executor: Any = rig.device.core.executor
    run = executor.run
    for _ in range(4):
        rig.proxy.down, rig.proxy.cut_after = rng.random() < 0.2, rng.choice([None, 900, rng.randrange(900, 9000)])
        before, private = rig.proxy.connections, rng.random() < 0.2
        if rng.random() < 0.6:
            lose_after(rig.device, rng.randrange(12))
        text = ""
        try:
            hints = {"private": private}
            async for chunk in await client.chat.completions.create(HELLO, stream=True, x_nearfar=hints, **ASK):
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert text == expected
        except (EngineError, OverloadError):
            assert expected.startswith(text)
        executor.run = run
        assert not private or rig.proxy.connections == before
    assert client.router._ledger.spent_day("another day") == 0, "a reservation was left behind"
    await asyncio.sleep(0.06)
    rig.proxy.down, rig.proxy.cut_after = False, None
    for _ in range(2):
        assert (await client.chat.completions.create(HELLO, **ASK)).choices[0].message.content == expected, "all is well again"


@pytest.mark.parametrize(("asked", "match"), [
    ({"n": 2}, "one answer"), ({"max_tokens": 0}, "max_tokens"), ({"x_nearfar": {"privat": True}}, "privat"),
    ({"x_nearfar": {"private": "yes"}}, "true or false"), ({"x_nearfar": {"mode": "near"}}, "mode"),
    ({"continue_final_message": True}, "continue_final_message"),
])  # fmt: skip
async def test_wrong_requests(rig: Rig, asked: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        await rig.client().chat.completions.create(HELLO, **{**ASK, **asked})
    assert rig.proxy.connections == 0


async def test_what_the_device_refuses_goes_to_the_cloud(rig: Rig) -> None:
    answer = await rig.client().chat.completions.create(HELLO, min_tokens=2, **ASK)
    assert (answer.x_nearfar.route, codes(answer.x_nearfar)[-1]) == ("cloud", "refused")
    with pytest.raises(RequestError, match="unknown parameter min_tokens"):
        await rig.client().chat.completions.create(HELLO, min_tokens=2, x_nearfar={"private": True}, **ASK)


async def test_a_server_on_this_machine_is_a_device(rig: Rig, server: RunningServer) -> None:
    client = rig.client(device=server.address, cloud=None)
    answer = await client.chat.completions.create(HELLO, x_nearfar={"private": True}, **ASK)
    assert (answer.choices[0].message.content, answer.x_nearfar.route) == (await rig.expected(), "device")
    with pytest.raises(RequestError, match="must be this machine"):
        AsyncHybridClient(device="http://example.com")
    with pytest.raises(RequestError, match="a device, a cloud, or both"):
        AsyncHybridClient()


def test_synchronous_beside_an_engine(server: RunningServer) -> None:
    with Engine(edge()) as engine, HybridClient(device=engine, cloud=server.address, difficulty=HARD) as client:
        whole = client.chat.completions.create(HELLO, **ASK)
        assert whole.x_nearfar.route == "device"
        parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(HELLO, stream=True, **ASK)]
        assert "".join(parts) == whole.choices[0].message.content
        there = client.chat.completions.create(HELLO, x_nearfar={"mode": "cloud_only"}, **ASK)
        assert (there.x_nearfar.route, there.choices[0].message.content) == ("cloud", whole.choices[0].message.content)
        with client.chat.completions.create(HELLO, stream=True, **ASK) as stream:
            next(iter(stream))
