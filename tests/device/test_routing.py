"""The hybrid client with the CPU artifact of the sample as device and `nearfar`'s own server as cloud, on
this machine.

Both run the same weights, so a greedy answer is the same text, whichever side gives which part of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.budget import kv_bytes
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.openai.knowledge import read_prompt
from nearfar.errors import ArtifactError, DeviceError, EngineError, RequestError
from nearfar.fallback_server.engines.local import TextOptions
from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
from nearfar.routing import Endpoint, HybridClient, Policy
from nearfar.routing.device import artifact_of
from nearfar.routing.fitted import ROW_TOKENS, FittedRouter, Point, Regression
from nearfar.routing.policy import MonitorOptions, RetryOptions
from nearfar.routing.shapes import Provenance
from tests.support.artifacts import Built
from tests.support.paths import ROOT
from tests.support.proxy import Proxy
from tests.support.servers import RunningServer

ASK: list[Any] = [{"role": "user", "content": "Tell me about the fox."}]
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
POLICY = Policy(retry=RetryOptions(base=0.01))


def difficulty(prompt: str) -> float:
    return 0.9 if "Prove" in prompt else 0.1


@pytest.fixture(scope="module")
def artifact(built: Built) -> Path:
    return built.of(ROOT / "examples" / "sample-model", "q4", "cpu") / "cpu"


@pytest.fixture(scope="module")
def device(artifact: Path) -> Iterator[Engine]:
    manifest = Artifact.open(artifact).manifest
    small = kv_bytes(manifest, manifest.programs[0], 256)
    with Engine.load(artifact, threads=1, kv_memory=small) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[RunningServer]:
    options = EngineOptions(
        threads=1, kv_memory="32MB", text=replace(TextOptions(), text_processes=1, template_timeout=10)
    )
    made = RunningServer(lambda: open_engine([str(artifact)], "artifact", options))
    yield made
    made.close()


@pytest.fixture
def cloud(server: RunningServer) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(device: Engine) -> str:
    """The answer where nothing fails."""
    return device.chat.completions.create(ASK, **GREEDY).choices[0].message.content


def ask(client: HybridClient, messages: list[Any] = ASK, **more: Any) -> tuple[str, Provenance]:
    chunks = list(client.chat.completions.create(messages, stream=True, **{**GREEDY, **more}))
    told = [chunk.x_nearfar for chunk in chunks if chunk.x_nearfar is not None]
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), told[-1]


def codes(told: Provenance) -> list[str]:
    return [reason.code for reason in told.reasons]


def lose_after(engine: Engine, tokens: int) -> None:
    """Make the device fail once, after this many steps."""
    executor: Any = engine.asynchronous.core.executor
    run, left = executor.run, 2 * tokens

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            executor.run = run
            raise DeviceError("device lost")
        return run(*args, **kwargs)

    executor.run = failing


def test_easy_stays_long_goes_hard_goes(device: Engine, cloud: Proxy, expected: str) -> None:
    with HybridClient(device=device, cloud=cloud.address, policy=POLICY, difficulty=difficulty) as client:
        text, told = ask(client)
        assert (text, told.route, cloud.connections) == (expected, "device", 0)
        _, told = ask(client, [{"role": "user", "content": "Prove it."}])
        assert (told.route, codes(told)) == ("cloud", ["hard"])
        text, told = ask(client, [{"role": "user", "content": "Tell me about the fox and the crow. " * 25}])
        assert (told.route, codes(told)) == ("cloud", ["context", "kv_memory"])
        assert text


def test_the_server_is_stopped_and_answers_go_on_here(device: Engine, cloud: Proxy, expected: str) -> None:
    with HybridClient(
        device=device, cloud=cloud.address, policy=replace(POLICY, mode="prefer_cloud")
    ) as client:
        text, told = ask(client)
        assert (text, told.route, told.degraded) == (expected, "cloud", False)
        cloud.down = True
        for _ in range(4):
            text, told = ask(client)
            assert (text, told.route, told.degraded) == (expected, "device", True)
        assert codes(told) == ["preferred", "breaker_open"]


@pytest.mark.parametrize("tokens", [0, 1, 6, 25])
def test_the_device_is_lost_in_mid_stream_and_the_text_is_whole(
    device: Engine, cloud: Proxy, expected: str, tokens: int
) -> None:
    with HybridClient(device=device, cloud=cloud.address, policy=POLICY, difficulty=difficulty) as client:
        lose_after(device, tokens)
        text, told = ask(client)
        assert (text, told.route, told.degraded) == (expected, "cloud", False)
        assert ask(client, x_nearfar={"mode": "device_only"})[0] == expected, "the device works again"


@pytest.mark.parametrize("after_cut", ["device", "cloud"])
@pytest.mark.parametrize("size", [1800, 3000, 6000])
def test_the_cloud_is_cut_in_mid_stream_and_the_text_is_whole(
    device: Engine, cloud: Proxy, expected: str, size: int, after_cut: Any
) -> None:
    policy = replace(POLICY, mode="prefer_cloud", after_cut=after_cut)
    with HybridClient(device=device, cloud=cloud.address, policy=policy) as client:
        cloud.cut_after = size
        text, told = ask(client)
        assert cloud.cut_after is None, "the cut must happen"
        assert (text, told.route, told.path[0]) == (expected, after_cut, "cloud")
        assert codes(told) == ["preferred", "cut"]


def test_private_never_connects(device: Engine, cloud: Proxy, expected: str) -> None:
    policy = replace(
        POLICY,
        mode="prefer_cloud",
        escalation="continue",
        monitor=MonitorOptions(logprob=-1e-6, min_tokens=2),
    )
    private = {"x_nearfar": {"private": True}}
    with HybridClient(device=device, cloud=cloud.address, policy=policy) as client:
        text, told = ask(client, **private)
        assert (text, codes(told)) == (expected, ["private"])
        lose_after(device, 5)
        with pytest.raises(EngineError, match="device lost"):
            ask(client, **private)
        with pytest.raises(RequestError, match="private"):
            ask(client, [{"role": "user", "content": "fox " * 500}], **private)
    assert cloud.connections == 0


def test_low_confidence_escalates_and_the_text_is_whole(device: Engine, cloud: Proxy, expected: str) -> None:
    monitor = MonitorOptions(window=4, min_tokens=8, logprob=-0.05)
    with HybridClient(
        device=device, cloud=cloud.address, policy=replace(POLICY, escalation="continue", monitor=monitor)
    ) as client:
        text, told = ask(client)
        assert (text, told.path, codes(told)[-1]) == (expected, ["device", "cloud"], "low_logprob")


def test_an_artifact_is_loaded_when_it_is_needed_and_its_speed_is_kept(
    artifact: Path, tmp_path: Path, expected: str
) -> None:
    state = tmp_path / "state.json"
    with HybridClient(device=artifact, state=state) as client:
        answer = client.chat.completions.create(ASK, **GREEDY)
        assert (answer.choices[0].message.content, answer.x_nearfar.route) == (expected, "device")
    assert json.loads(state.read_text())["speeds"]["device"]["decode_tps"] > 0
    with (
        HybridClient(device=tmp_path / "nothing") as client,
        pytest.raises(ArtifactError, match="does not exist"),
    ):
        client.chat.completions.create(ASK, **GREEDY)
    nobody = Endpoint("http://127.0.0.1:9", model="none")
    with (
        HybridClient(cloud=nobody, policy=POLICY) as client,
        pytest.raises(EngineError, match="connection refused"),
    ):
        client.chat.completions.create(ASK, **GREEDY)


def test_a_fitted_router_decides_by_what_the_model_shows_and_its_answer_reuses_the_prompt(
    device: Engine, server: RunningServer, tmp_path: Path
) -> None:
    told = artifact_of(device.asynchronous)
    # On the sample model the entropy of the first token tells nothing; any direction of it is a router.
    by_length = Regression(("length",), (0.0,), (1.0,), (1.0,), -math.log(60), 0.5, None)
    made = FittedRouter("sample", told, 50, by_length, 0.5, None, None, 8, (Point(0, 1, None, 0, None),))
    path, records = tmp_path / "router.json", tmp_path / "records.jsonl"
    made.save(path)
    cloud = Endpoint(server.address, key=None)
    policy = replace(POLICY, router=path)
    with HybridClient(device=device, cloud=cloud, policy=policy, records=records) as client:
        short = client.chat.completions.create(messages=ASK, **GREEDY)
        long = client.chat.completions.create(
            messages=[{"role": "user", "content": "Tell me about the fox. " * 12}], **GREEDY
        )
        secret = client.chat.completions.create(
            messages=[{"role": "user", "content": "Tell me about the hen. " * 12}],
            x_nearfar={"private": True},
            **GREEDY,
        )
    routes = [(one.x_nearfar.route, one.x_nearfar.reasons[0].code) for one in (short, long, secret)]
    assert routes == [("device", "easy"), ("cloud", "hard"), ("device", "private")]
    written = [json.loads(line) for line in records.read_text().splitlines()]
    assert written[0]["artifact"] == told
    assert set(written[0]["knowledge"]) == {"prompt_tokens", "top", "prompt_logprob", "sure", "row"}
    assert written[0]["knowledge"]["row"] == []
    assert len(written[0]["outcome"]["first_tokens"]) == 16
    assert written[0]["request"]["conversation"]["cached_device"] <= written[0]["request"]["prompt_tokens"]
    assert "knowledge" not in written[2]
    assert written[2]["outcome"]["first_tokens"] is None
    policy = replace(POLICY, router="record", shadow="device")
    with HybridClient(device=device, cloud=cloud, policy=policy, records=records) as client:
        plain = client.chat.completions.create(messages=ASK, **GREEDY)
    assert plain.x_nearfar.reasons[0].code == "preferred"
    last = json.loads(records.read_text().splitlines()[-1])
    assert last["knowledge"]["sure"] is None
    assert len(last["knowledge"]["row"]) == ROW_TOKENS
    assert len(last["outcome"]["first_tokens"]) == 16
    # Budgets win: a request that is too expensive stays on the device, however hard it is.
    broke = Policy.parse({"router": json.loads(path.read_text()), "budget_day": 1})
    with HybridClient(device=device, cloud=cloud, policy=broke) as client:
        kept = client.chat.completions.create(
            messages=[{"role": "user", "content": "Tell me about the fox. " * 12}], **GREEDY
        )
    told_it = kept.x_nearfar
    assert (told_it.route, told_it.degraded) == ("device", True)
    assert [reason.code for reason in told_it.reasons] == ["hard", "budget_day"]
    replace(made, artifact="0" * 64).save(path)
    with (
        HybridClient(device=device, cloud=cloud, policy=replace(POLICY, router=path)) as client,
        pytest.raises(RequestError, match="fit a router to this model"),
    ):
        client.chat.completions.create(messages=ASK, **GREEDY)
    with pytest.raises(RequestError, match="and difficulty"):
        HybridClient(device=device, cloud=cloud, policy=replace(POLICY, router=path), difficulty=difficulty)
    assert device.asynchronous.core.scheduler.running == [], "no prompt that was read is still held"


def test_an_answer_that_a_fitted_router_doubts_is_never_shown_except_where_the_cloud_may_not_have_it(
    device: Engine, cloud: Proxy, expected: str
) -> None:
    easy = Regression(("length",), (0.0,), (1.0,), (0.0,), -5.0, 0.5, None)
    doubts = Regression(("mean_logprob",), (0.0,), (1.0,), (0.0,), 5.0, 0.5, None)
    made = FittedRouter(
        "sample",
        artifact_of(device.asynchronous),
        50,
        easy,
        0.5,
        doubts,
        0.5,
        6,
        (Point(0, 1, None, 0, None),),
    )
    data = json.loads(json.dumps({"format": "nearfar-router", "version": 2, **asdict(made)}))
    policy = replace(POLICY, router=data)
    with HybridClient(device=device, cloud=cloud.address, policy=policy) as client:
        text, told = ask(client)
        assert (text, told.path, codes(told)) == (expected, ["cloud"], ["easy", "doubtful"])
        assert ask(client, max_tokens=2)[1].path == ["cloud"], "a short answer is judged at its end"
        connections = cloud.connections
        text, told = ask(client, [{"role": "user", "content": "My secret hen."}], x_nearfar={"private": True})
        assert (told.path, codes(told)) == (["device"], ["private"])
    with HybridClient(device=device, cloud=cloud.address, policy=replace(policy, budget_day=1)) as client:
        text, told = ask(client)
        assert (text, told.path, told.degraded) == (expected, ["device"], False)
        assert codes(told) == ["easy", "budget_day"]
    assert cloud.connections == connections
    assert device.asynchronous.core.scheduler.running == [], "no prompt that was read is still held"


def test_what_a_model_shows_about_a_prompt(device: Engine) -> None:
    engine = device.asynchronous
    ask = [{"role": "user", "content": "Once there was a hen, and she had a plan."}]
    asked = device.loop.run(read_prompt(engine, ask))
    made = asked.knowledge
    tokens = engine.codec.encode_chat(ask)
    assert made.prompt_tokens == len(tokens)
    first = device.completions.create(tokens, max_tokens=1, temperature=0, logprobs=2).choices[0].logprobs
    assert first is not None
    best, second = sorted(first.top_logprobs[0].values(), reverse=True)[:2]
    assert made.top[:2] == pytest.approx((best, second), abs=1e-3)
    assert len(made.top) == 20
    assert sum(map(math.exp, made.top)) < 1
    read = device.loop.run(read_prompt(engine, ask, ask=False, tokens=tuple(range(64))))
    shown = read.knowledge.row
    assert [token for token, _ in shown] == list(range(64))
    assert all(logprob <= made.top[0] + 1e-4 for _, logprob in shown)
    assert made.sure is not None
    for held in (asked, read):
        device.loop.run(held.release())


def test_tokens_of_the_last_row_take_no_room_in_the_context(device: Engine) -> None:
    engine = device.asynchronous
    ask = [{"role": "user", "content": ""}]
    while len(engine.codec.encode_chat(ask)) < engine.context - 16:
        ask[0]["content"] += " hen" * 4
    read = device.loop.run(read_prompt(engine, ask, ask=False, tokens=tuple(range(128))))
    assert len(read.knowledge.row) == 128
    device.loop.run(read.release())


def test_an_answer_shares_the_prompt_that_was_read_for_its_decision(device: Engine) -> None:
    """The answer computes the last token again, and no page. Then nothing holds the prompt."""
    engine = device.asynchronous
    scheduler = engine.core.scheduler
    ask = [{"role": "user", "content": "Tell me of the goose that read the whole library."}]
    free = scheduler.free_tokens
    held = device.loop.run(read_prompt(engine, ask, ask=False))
    assert [request.idle for request in scheduler.running] == [True]
    assert scheduler.free_tokens == free, "a prompt that is only held makes room for others"
    usage = device.chat.completions.create(messages=ask, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    device.loop.run(held.release())
    assert scheduler.running == []
