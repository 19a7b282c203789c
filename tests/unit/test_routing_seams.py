"""Borders of the hybrid client: streams that nobody reads, a device that hangs in its first step, files, the
score.
"""

from __future__ import annotations

import asyncio
import gc
import os
import stat
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime import AsyncEngine
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import RequestError
from nearfar.routing import AsyncHybridClient, HybridClient, Policy
from nearfar.routing.policy import Timeouts
from nearfar.routing.router import Router
from tests.support import tiny
from tests.support.scripted import ScriptedServer
from tests.support.servers import tiny_core

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WHOLE = ["piece x 3 =stop", "ended x"]
BUDGETED = Policy(mode="prefer_cloud", budget_day=100)


@pytest.fixture
async def device() -> AsyncIterator[AsyncEngine]:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    async with AsyncEngine(tiny_core(), TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256)) as engine:
        yield engine


def reserved(router: Router) -> float:
    """The amount reserved for calls under way."""
    return router._ledger.spent_day("another day")


async def test_a_stream_that_is_dropped_gives_its_budget_back() -> None:
    with ScriptedServer([WHOLE]) as cloud:
        async with AsyncHybridClient(cloud=cloud.address, policy=BUDGETED) as client:
            stream = await client.chat.completions.create(HELLO, stream=True, max_tokens=50)
            assert reserved(client.router) > 0
            del stream
            for _ in range(200):
                gc.collect()
                await asyncio.sleep(0.01)
                if not reserved(client.router):
                    break
            assert reserved(client.router) == 0


def test_a_synchronous_stream_that_is_dropped_gives_its_budget_back() -> None:
    with ScriptedServer([WHOLE]) as cloud, HybridClient(cloud=cloud.address, policy=BUDGETED) as client:
        stream = client.chat.completions.create(HELLO, stream=True, max_tokens=50)
        router = client.asynchronous.router
        assert reserved(router) > 0
        del stream
        until = time.monotonic() + 10
        while reserved(router) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert reserved(router) == 0


def test_a_closed_client_leaves_nothing_pending(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(
        4
    ):  # several tries: which of the library's generators are still open depends on the moment
        with ScriptedServer([WHOLE]) as cloud, HybridClient(cloud=cloud.address) as client:
            client.chat.completions.create(messages=[{"role": "user", "content": "Hello"}])
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_device_that_hangs_in_its_first_step_is_given_up(device: AsyncEngine) -> None:
    executor: Any = device.core.executor
    run, resume = executor.run, threading.Event()

    def hanging(*args: Any, **kwargs: Any) -> Any:
        resume.wait(60)
        return run(*args, **kwargs)

    executor.run = hanging
    policy = Policy(timeouts=Timeouts(device_first_token=0.3))
    try:
        with ScriptedServer([WHOLE]) as cloud:
            async with AsyncHybridClient(device=device, cloud=cloud.address, policy=policy) as client:
                began = time.monotonic()
                answer = await client.chat.completions.create(HELLO, max_tokens=5)
                assert time.monotonic() - began < 20
                assert answer.x_nearfar.path == ["cloud"]
                assert (answer.x_nearfar.reasons[-1].code, answer.x_nearfar.reasons[-1].value) == (
                    "failed",
                    "stalled",
                )
    finally:
        resume.set()


async def test_records_and_state_are_their_owners_alone(tmp_path: Path) -> None:
    records, state = tmp_path / "records.jsonl", tmp_path / "state.json"
    before = os.umask(0)
    try:
        with ScriptedServer([WHOLE]) as cloud:
            async with AsyncHybridClient(cloud=cloud.address, records=records, state=state) as client:
                await client.chat.completions.create(HELLO)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (records, state)] == [0o600, 0o600]


async def test_no_prompt_is_sent_away_for_its_looks_unless_the_score_is_asked_for(
    device: AsyncEngine,
) -> None:
    hard: list[Any] = [
        {"role": "user", "content": "What is 2+2? What is 12*12, 13*13 and 7*8*9, in that order?"}
    ]
    with ScriptedServer([WHOLE]) as cloud:
        async with AsyncHybridClient(device=device, cloud=cloud.address) as client:
            answer = await client.chat.completions.create(hard, max_tokens=3)
            assert answer.x_nearfar.path == ["device"]
            assert [reason.code for reason in answer.x_nearfar.reasons] == ["preferred"]
        policy = Policy(difficulty_threshold=0.0)
        async with AsyncHybridClient(
            device=device, cloud=cloud.address, difficulty="english", policy=policy
        ) as client:
            answer = await client.chat.completions.create(hard, max_tokens=3)
            assert (answer.x_nearfar.path, answer.x_nearfar.reasons[0].code) == (["cloud"], "hard")
        with pytest.raises(RequestError, match="'english'"):
            AsyncHybridClient(device=device, difficulty="auto")  # type: ignore[arg-type]


async def test_the_device_says_of_itself_that_it_has_lost_its_thread(device: AsyncEngine) -> None:
    """With the defaults: a greedy model without penalties repeats itself, and its whole answer is
    replaced.
    """
    with ScriptedServer([WHOLE]) as cloud:
        async with AsyncHybridClient(device=device, cloud=cloud.address) as client:
            answer = await client.chat.completions.create(HELLO, max_tokens=200, temperature=0)
            assert (answer.x_nearfar.path, answer.choices[0].message.content) == (["cloud"], "x x x ")
            assert answer.x_nearfar.reasons[-1].code == "repetition"
