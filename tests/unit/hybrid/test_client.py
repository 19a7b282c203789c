"""The hybrid client over real parts: where requests go, their costs, and the state that is kept."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nearfar.cli import typer_app
from nearfar.edge_runtime import AsyncEngine, Engine
from nearfar.edge_runtime.grammars import compiler
from nearfar.errors import ArtifactError, RequestError
from nearfar.routing import AsyncHybridClient, HybridClient
from nearfar.routing.power import Power
from nearfar.routing.shapes import ChatCompletion
from nearfar.routing.speed import Speeds
from tests.support import tiny
from tests.support.hybrid import (
    ASK,
    HARD,
    HELLO,
    QUICK,
    Rig,
    codes,
    edge,
)
from tests.support.routing_vectors import VECTORS
from tests.support.servers import RunningServer

FIELDS = json.loads((VECTORS / "device_fields.json").read_text(encoding="utf-8"))


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
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                HELLO, stream=True, stream_options={"include_usage": True}, x_nearfar={"mode": mode}, **ASK
            )
        ]
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

    small = Small(tiny.core(), rig.device.codec)  # the context has 160 tokens
    async with small:
        client = rig.client(device=small)
        long = [{"role": "user", "content": "fox " * 60}]
        answer = await client.chat.completions.create(long, **ASK)
        assert answer.x_nearfar.route == "cloud"
        assert "context" in codes(answer.x_nearfar)
        with pytest.raises(RequestError, match=r"do not fit its context .*request is private"):
            await client.chat.completions.create(long, x_nearfar={"private": True}, **ASK)


@pytest.mark.parametrize("installed", [True, False])
async def test_formats_go_to_who_can(rig: Rig, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats go to the device if it has the library for grammars."""
    if not installed:
        monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    for form in ({"type": "regex", "regex": "[a-z]{4}"}, {"type": "grammar", "grammar": 'root ::= "abcd"'}):
        answer = await rig.client().chat.completions.create(
            HELLO, max_tokens=40, temperature=0, response_format=form
        )
        route = "device" if installed else "cloud"
        assert (answer.x_nearfar.route, len(answer.choices[0].message.content or "")) == (route, 4)


@pytest.mark.parametrize("installed", [True, False])
async def test_tools_go_to_who_can(rig: Rig, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed:
        monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    client = rig.client()
    tool = {
        "type": "function",
        "function": {"name": "go", "parameters": {"type": "object", "properties": {}}},
    }
    called = await client.chat.completions.create(
        HELLO, tools=[tool], tool_choice="required", max_tokens=300, temperature=0
    )
    assert called.x_nearfar.route == ("device" if installed else "cloud")
    assert called.choices[0].message.tool_calls is not None
    assert called.choices[0].message.tool_calls[0].function.name == "go"
    assert called.choices[0].finish_reason in ("tool_calls", "length"), (
        "a random model may add blanks for long"
    )
    stream = await client.chat.completions.create(
        HELLO, tools=[tool], tool_choice="required", max_tokens=300, temperature=0, stream=True
    )
    parts = [
        call async for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()
    ]
    first, *pieces = [part for part in parts if part.index == 0]
    assert (first.type, first.function.name, first.function.arguments) == ("function", "go", "")
    assert first.id
    assert {(piece.type, piece.id, piece.function.name) for piece in pieces} == {(None, None, None)}
    written = "".join(piece.function.arguments for piece in pieces)
    assert written == called.choices[0].message.tool_calls[0].function.arguments


async def test_shadow_answers_here_and_tells_what_it_would_have_done(rig: Rig, tmp_path: Path) -> None:
    client = rig.client(replace(QUICK, shadow="device"), records=tmp_path / "log.jsonl")
    answer = await client.chat.completions.create([{"role": "user", "content": "prove it"}], **ASK)
    assert (answer.x_nearfar.route, answer.x_nearfar.would_route, rig.proxy.connections) == (
        "device",
        "cloud",
        0,
    )
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
    for words, more in (
        ("fox", {}),
        ("cat", {"x_nearfar": {"private": True}}),
        ("fox", {"x_nearfar": {"mode": "cloud_only"}}),
    ):
        await client.chat.completions.create([{"role": "user", "content": words}], **more, **ASK)
    rig.proxy.down = True
    await client.chat.completions.create(HELLO, x_nearfar={"mode": "prefer_cloud"}, **ASK)
    with pytest.raises(RequestError, match="neither the device nor the cloud"):
        await client.chat.completions.create(
            [{"role": "user", "content": "fox " * 900}], x_nearfar={"private": True}, **ASK
        )
    again = await client.chat.completions.create([{"role": "user", "content": "cat"}], **ASK)
    assert again.x_nearfar.path == ["device"]  # the conversation was private before
    done = CliRunner().invoke(typer_app, ["route", "log", str(path), "--json"])
    assert done.exception is None, done.exception
    found = json.loads(done.stdout)
    assert {
        name: found[name]
        for name in (
            "requests",
            "device",
            "cloud",
            "degraded",
            "private",
            "private_by_earlier_text",
            "private_by_quotation",
            "failed",
        )
    } == {
        "requests": 6,
        "device": 4,
        "cloud": 1,
        "degraded": 1,
        "private": 3,
        "private_by_earlier_text": 1,
        "private_by_quotation": 0,
        "failed": 1,
    }
    assert found["reasons"]["easy"] == 1
    assert found["spent"] > 0
    assert found["median_ttft_cloud"] > 0
    path.write_text(path.read_text() + "{}\n")
    assert isinstance(CliRunner().invoke(typer_app, ["route", "log", str(path)]).exception, RequestError)


async def test_budgets_hold_also_for_requests_at_once_and_from_start_to_start(
    rig: Rig, tmp_path: Path
) -> None:
    policy = replace(QUICK, mode="prefer_cloud", budget_day=200)  # an answer costs about 70 tokens
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
    other = await client.chat.completions.create(
        HELLO, extra_body={"x_nearfar": {"conversation": "b"}}, **ASK
    )
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
    here = await client.chat.completions.create(
        HELLO, stream=True, x_nearfar={"mode": "device_only"}, **{**ASK, "max_tokens": 900}
    )
    await here.close()
    assert not rig.device.core.scheduler.running


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
    routes = [
        (await client.chat.completions.create(hard, **{**ASK, "max_tokens": 1})).x_nearfar.route
        for _ in range(9)
    ]
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
    client.router.device.speeds.prefill_tps = 10.0  # the speed of a slow device
    mine = {"x_nearfar": {"conversation": "a"}}
    turns = [{"role": "user", "content": "prove it"}]
    first = await client.chat.completions.create(turns, **mine, **ASK)
    assert first.x_nearfar.route == "cloud"
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and then " * 10},
    ]
    second = await client.chat.completions.create(turns, **mine, **ASK)
    assert (second.x_nearfar.route, codes(second.x_nearfar)) == ("cloud", ["sticky"])
    stranger = await client.chat.completions.create(turns, **ASK)
    assert stranger.x_nearfar.route == "device"
    third = await client.chat.completions.create(turns, **mine, **ASK)
    assert (third.x_nearfar.route, codes(third.x_nearfar)) == ("device", ["easy"]), (
        "the device's cache is warm by now"
    )


async def test_slow_devices_and_empty_batteries_send_work_away(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "import nearfar.routing.difficulty, nearfar.routing.ledger, nearfar.routing.confidence, "
        "nearfar.routing.retry\n"
        "assert not {'numpy', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "try: r.HybridClient\n"
        "except ImportError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (
        "the hybrid client needs httpx: pip install 'nearfar[routing]'\n",
        "",
    )


@pytest.mark.parametrize(("asked", "match"), [
    ({"n": 2}, "one answer"), ({"max_tokens": 0}, "max_tokens"), ({"x_nearfar": {"privat": True}}, "privat"),
    ({"x_nearfar": {"private": "yes"}}, "true or false"), ({"x_nearfar": {"mode": "near"}}, "mode"),
    ({"continue_final_message": True}, "continue_final_message"),
])  # fmt: skip
async def test_wrong_requests(rig: Rig, asked: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        await rig.client().chat.completions.create(HELLO, **{**ASK, **asked})
    assert rig.proxy.connections == 0


@pytest.mark.parametrize("case", FIELDS, ids=lambda case: case["name"])
async def test_fields_on_the_device(rig: Rig, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    completions, seen = rig.device.chat.completions, dict[str, Any]()
    create = completions.create

    async def watched(messages: Any, **params: Any) -> Any:
        seen.update(params)
        return await create(messages, **params)

    monkeypatch.setattr(completions, "create", watched)
    client, alone = rig.client(), {"mode": "device_only"}
    asked = {"max_tokens": 4, **case["request"]}
    if case["refused"] is None:
        answer = await client.chat.completions.create(HELLO, x_nearfar=alone, **asked)
        assert answer.x_nearfar.route == "device"
    else:
        with pytest.raises(RequestError, match=f"unknown parameter {case['refused']}") as refusal:
            await client.chat.completions.create(HELLO, x_nearfar=alone, **asked)
        assert refusal.value.param == case["refused"]
    given = {name: value for name, value in seen.items() if name not in ("stream", "stream_options")}
    assert given == {"max_tokens": 4, **case["sent"]}


async def test_a_server_on_this_machine_is_a_device(rig: Rig, server: RunningServer) -> None:
    client = rig.client(device=server.address, cloud=None)
    answer = await client.chat.completions.create(HELLO, x_nearfar={"private": True}, **ASK)
    assert (answer.choices[0].message.content, answer.x_nearfar.route) == (await rig.expected(), "device")
    with pytest.raises(RequestError, match="must be this machine"):
        AsyncHybridClient(device="http://example.com")
    with pytest.raises(RequestError, match="a device, a cloud, or both"):
        AsyncHybridClient()


def test_synchronous_beside_an_engine(server: RunningServer) -> None:
    with (
        Engine(edge()) as engine,
        HybridClient(device=engine, cloud=server.address, difficulty=HARD) as client,
    ):
        whole = client.chat.completions.create(HELLO, **ASK)
        assert whole.x_nearfar.route == "device"
        parts = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(HELLO, stream=True, **ASK)
        ]
        assert "".join(parts) == whole.choices[0].message.content
        there = client.chat.completions.create(HELLO, x_nearfar={"mode": "cloud_only"}, **ASK)
        assert (there.x_nearfar.route, there.choices[0].message.content) == (
            "cloud",
            whole.choices[0].message.content,
        )
        with client.chat.completions.create(HELLO, stream=True, **ASK) as stream:
            next(iter(stream))


def test_a_client_that_is_dropped_closes_its_connections(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = HybridClient(cloud=server.address)
    thread, completions = client._own, client.chat.completions
    assert thread is not None
    side: Any = client.asynchronous.router.cloud
    session = side._http._transport.client
    assert callable(session), "there is no session before the first request"
    del client
    gc.collect()
    completions.create(HELLO, **ASK)
    session = side._http._transport.client
    gc.collect()
    assert not session.closed, "its completions still use it"
    del side, completions
    gc.collect()
    assert session.closed
    del session
    gc.collect()
    assert "Unclosed" not in caplog.text
    thread.stop()
