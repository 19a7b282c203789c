"""A short request beside long prompts: every engine shares the rows of a step in the same way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime.cache import SequenceTable
from nearfar.edge_runtime.engine.prefill import OVERTAKEN, share_rows
from nearfar.edge_runtime.engine.requests import Request
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.engine.scheduler import Scheduler, StepLimits
from nearfar.fallback_server.backend import Sampling, TokenRequest
from nearfar.fallback_server.engines.artifact import ArtifactBackend
from nearfar.fallback_server.torch_engine import scheduler as torch_scheduler
from tests import vectors
from tests.support.servers import tiny_core

SHARES = json.loads(Path(vectors.__file__).with_name("prefill").joinpath("shares.json").read_text())
TIMES = 3
"""The most steps of a short request beside an attack, as a multiple of its steps alone."""


@pytest.mark.parametrize("vector", SHARES, ids=str)
def test_prompts_share_a_step_as_the_vectors_say(vector: dict[str, Any]) -> None:
    assert share_rows(vector["wanted"], vector["budget"]) == vector["shares"]


def prompt(length: int, first: int) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def computed(s: Scheduler) -> list[Request]:
    """Run one step with made-up tokens; gives the requests that got one."""
    step = s.schedule(None)
    assert step is not None
    s.queue(step)
    s.publish(step)
    for request in step.sampled:
        request.accept(7)
        s.record(request)
    return list(step.sampled)


def edge(attack: list[int], word: int, pages: int = 400) -> int:
    """Steps of the artifact engine until a prompt of `word` tokens after the attack's prompts is computed."""
    s = Scheduler(SequenceTable(pages, 16, 16), StepLimits((1, 4, 16, 64, 256), 16, 4096))
    for number, length in enumerate([*attack, word]):
        s.add(Request(prompt(length, 10_000 * number), SamplingParams(temperature=0), 100, 0))
    last = s.waiting[-1]
    for steps in range(1, 200):
        if last in computed(s):
            return steps
    raise AssertionError("never")


def torch(attack: list[int], word: int, pages: int = 400) -> int:
    """Steps of the torch engine until a prompt of `word` tokens after the attack's prompts is computed."""
    limits = torch_scheduler.BatchLimits(16, 256)
    s = torch_scheduler.WorkScheduler(SequenceTable(pages, 16, 16), limits)
    works = [
        torch_scheduler.Work(str(number), list(prompt(length, 10_000 * number)), arrival=float(number))
        for number, length in enumerate([*attack, word])
    ]
    for work in works:
        s.add(work)
    for steps in range(1, 200):
        chunks = s.schedule()
        for chunk in chunks:
            if chunk.samples:
                chunk.work.tokens.append(7)
        if any(chunk.work is works[-1] and chunk.samples for chunk in chunks):
            return steps
    raise AssertionError("never")


@pytest.mark.parametrize("engine", [edge, torch])
@pytest.mark.parametrize("attack", [[2000], [950] * 8, [950] * 8 + [400] * 4, [4000]], ids=str)
@pytest.mark.parametrize("word", [1, 40])
def test_a_word_beside_long_prompts(engine: Callable[..., int], attack: list[int], word: int) -> None:
    assert engine(attack, word) <= TIMES * engine([], word)


@pytest.mark.parametrize("engine", [edge, torch])
def test_a_word_goes_past_a_prompt_that_finds_no_room(engine: Callable[..., int]) -> None:
    """The first two prompts fill the cache. The third finds room only when one of them ends, which never
    happens here.
    """
    assert engine([900, 900, 900], 1, pages=128) <= TIMES * engine([], 1)


def test_who_finds_no_room_is_overtaken_a_bounded_number_of_times() -> None:
    s = Scheduler(SequenceTable(64, 16, 16), StepLimits((1, 4, 16, 64, 256), 16, 4096))
    holder, large = (Request(prompt(600, n), SamplingParams(temperature=0), 400, 0) for n in (0, 10_000))
    for request in (holder, large):
        s.add(request)
    for number in range(2 * OVERTAKEN):
        word = Request(prompt(3, 20_000 + 10 * number), SamplingParams(temperature=0), 1, 0)
        s.add(word)
        if word in computed(s):
            s.remove(word)
    assert large.overtaken == OVERTAKEN
    s.remove(holder)
    s.schedule(None)
    assert large in s.running


async def test_a_prompt_of_many_steps_leaves_the_server_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token comes while a long prompt is computed; its steps show that the engine is alive."""
    core = tiny_core()
    backend = ArtifactBackend(core)
    stream = backend.submit(TokenRequest("long", tuple(range(200)) * 4, 1, Sampling(0.0)))
    while core.steps < 2 or core.last_read < 0:
        await asyncio.sleep(0)
    assert not backend.stats().generated_tokens
    assert await backend.alive()
    assert backend._probe is None
    # On a device whose steps take a minute, the last half a minute says nothing against it.
    monkeypatch.setattr(core, "last_read", time.monotonic() - 30)
    monkeypatch.setattr(core, "step_seconds", 60.0)
    assert await backend.alive()
    assert backend._probe is None
    async for _ in stream:
        pass
    core.last_read, core.step_seconds = time.monotonic() - 30, 1.0
    assert await backend.alive()
    assert backend._probe is not None
    await backend.close()
