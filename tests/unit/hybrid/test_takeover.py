"""The hybrid client over real parts that fail: which side takes over, and that no text is lost or
repeated.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from nearfar.errors import EngineError, OverloadError, RequestError
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.routing import Endpoint, HybridClient
from nearfar.routing.policy import BreakerOptions, Policy, RetryOptions, Timeouts
from nearfar.routing.request import Hints
from nearfar.routing.types import MODES
from tests.support.hybrid import (
    ASK,
    CHUNK,
    HELLO,
    LOW,
    QUICK,
    Odd,
    Rig,
    codes,
    lose_after,
    streamed,
)
from tests.support.servers import RunningServer, tiny_engine


async def test_the_cloud_is_down_and_the_device_answers_degraded(rig: Rig) -> None:
    client = rig.client(replace(QUICK, breaker=BreakerOptions(failures=2, seconds=60)))
    rig.proxy.down = True
    for attempt in range(3):
        text, told = await streamed(client, x_nearfar={"mode": "prefer_cloud"})
        assert text == await rig.expected()
        assert (told[-1].route, told[-1].degraded) == ("device", True)
        assert ("failed" if attempt < 2 else "breaker_open") in codes(told[-1])
    assert rig.proxy.connections == 2, "an open breaker asks nobody"
    with pytest.raises(OverloadError, match="is asked again in") as raised:
        await client.chat.completions.create(HELLO, x_nearfar={"mode": "cloud_only"}, **ASK)
    assert 50 < raised.value.retry_after <= 60


@pytest.mark.parametrize(("status", "body", "silent", "code"), [
    ("401 Unauthorized", '{"error": {"message": "no such key"}}', False, "401"),
    ("500 Oops", "<html>", False, "500"),
    ("503 Busy\r\nRetry-After: 7", "", False, "503"),
    ("302 Found\r\nLocation: http://127.0.0.1:9/", "", False, "302"),
    ("200 OK", "<html>sign in to the network</html>", False, "cut"),
    ("200 OK", "data: not json\n\n", False, "shape"),
    ("200 OK", 'data: {"choices": 7}\n\n', False, "shape"),
    ("200 OK", 'data: {"error": {"message": "overloaded"}}\n\n', False, "error"),
    ("200 OK", "", True, "timeout"),
])  # fmt: skip
async def test_whatever_a_cloud_answers_the_device_answers_better(
    rig: Rig, status: str, body: str, silent: bool, code: str
) -> None:
    with Odd(status, body, silent) as odd:
        policy = replace(
            QUICK, mode="prefer_cloud", timeouts=Timeouts(connect=2, first_token=0.3 if silent else 20)
        )
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
    """A server without continue_final_message gets whole requests only."""
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
    with Odd("200 OK", body, silent=True) as odd:
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
        assert codes(told[-1]) == ["preferred", "retry_after"], (
            "the cloud is left alone for as long as it asked"
        )
        alone = rig.client(replace(QUICK, mode="cloud_only", retry=RetryOptions(max_wait=0.1)), cloud=cloud)
        with pytest.raises(OverloadError, match="429"):
            await alone.chat.completions.create(HELLO, **ASK)
    finally:
        busy.close()


@pytest.mark.parametrize("steps", [1, 2, 9, 30])
async def test_the_device_is_lost_in_mid_stream_and_the_cloud_goes_on(rig: Rig, steps: int) -> None:
    expected = await rig.expected()
    lose_after(rig.device, 2 * steps)  # two calls for each step: the step and its sampling
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
    # The cloud's first grammar imports its library: more than QUICK's 10 seconds on a machine that is busy.
    patient = replace(QUICK.timeouts, first_token=120)
    client = rig.client(replace(QUICK, mode="prefer_cloud", timeouts=patient))
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
    whole = await rig.client(replace(QUICK, escalation="restart", monitor=LOW)).chat.completions.create(
        HELLO, **ASK
    )
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
    """The device's first step lasts until the cloud's whole answer is here and the device was stopped."""
    expected = await rig.expected()
    client = rig.client(replace(QUICK, hedge_seconds=0.0))
    executor: Any = rig.device.core.executor
    run, go_on = executor.run, threading.Event()

    def hanging(*args: Any, **kwargs: Any) -> Any:
        go_on.wait(60)
        return run(*args, **kwargs)

    executor.run = hanging
    try:
        text, told = await streamed(client)
        assert text == expected
        assert codes(told[-1])[-1] == "hedged"
        assert rig.proxy.connections == 1
        assert told[-1].path == ["cloud"]
        scheduler = rig.device.core.scheduler
        async with asyncio.timeout(30):
            while scheduler.running or scheduler.waiting:
                await asyncio.sleep(0.01)
    finally:
        executor.run = run
        go_on.set()
    rig.proxy.down = True
    text, told = await streamed(client)
    assert (text, told[-1].route) == (expected, "device")


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


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_fails_when_the_text_is_whole_or_an_error_tells_and_nothing_comes_twice(
    rig: Rig, seed: int
) -> None:
    rng = random.Random(seed)
    expected = await rig.expected()
    policy = replace(
        QUICK,
        mode=rng.choice(MODES),
        after_cut=rng.choice(["device", "cloud"]),
        hold_tokens=rng.choice([0, 10]),
        breaker=BreakerOptions(rng.choice([1, 3]), 0.05, 0.05),
        device_breaker=BreakerOptions(1, 0.05, 0.05),
        retry=RetryOptions(base=0.01, before_fallback=rng.choice([0, 1])),
    )
    watched: dict[str, Any] = {"escalation": rng.choice(["continue", "restart"]), "monitor": LOW}
    client = rig.client(replace(policy, **rng.choice([{}, {"hedge_seconds": 0.0}, watched])))
    executor: Any = rig.device.core.executor
    run = executor.run
    for _ in range(4):
        rig.proxy.down, rig.proxy.cut_after = (
            rng.random() < 0.2,
            rng.choice([None, 900, rng.randrange(900, 9000)]),
        )
        before, private = rig.proxy.connections, rng.random() < 0.2
        if rng.random() < 0.6:
            lose_after(rig.device, rng.randrange(12))
        text = ""
        try:
            hints = {"private": private}
            async for chunk in await client.chat.completions.create(
                HELLO, stream=True, x_nearfar=hints, **ASK
            ):
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
        assert (await client.chat.completions.create(HELLO, **ASK)).choices[0].message.content == expected, (
            "all is well again"
        )


async def test_what_the_device_refuses_goes_to_the_cloud(rig: Rig) -> None:
    answer = await rig.client().chat.completions.create(HELLO, min_tokens=2, **ASK)
    assert (answer.x_nearfar.route, codes(answer.x_nearfar)[-1]) == ("cloud", "refused")
    with pytest.raises(RequestError, match="unknown parameter min_tokens"):
        await rig.client().chat.completions.create(HELLO, min_tokens=2, x_nearfar={"private": True}, **ASK)


def test_what_a_client_cannot_work_with_is_told_with_its_value_and_what_to_do() -> None:
    for make, words in (
        (lambda: Endpoint("localhost:8000"), "must be such as http://127.0.0.1:8000, not 'localhost:8000'"),
        (lambda: Endpoint(""), "not ''"),
        (lambda: Endpoint("http://here", key=cast(str, 3)), "key must be a string, not a int"),
        (
            lambda: HybridClient(cloud="http://here", policy=cast(Policy, {"mode": "auto"})),
            "must be a Policy",
        ),
        (lambda: Hints.parse({"privat": True}), "x_nearfar has no field privat: did you mean private?"),
        (lambda: Hints.parse({"zzz": 1}), "; there are conversation, expected_tokens, mode, private"),
    ):
        with pytest.raises(RequestError) as caught:
            make()
        assert words in str(caught.value)
