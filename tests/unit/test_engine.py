"""The engine over the reference executor: batches, prefixes, preemption, cancellation, seeds."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import numpy as np
import pytest

from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.requests import TokenEvent
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.errors import DeviceError, RequestError
from tests.support import tiny
from tests.support.numpy_executor import NumpyExecutor

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
both = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "lockstep"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


async def collect(core: EngineCore, tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return [event.token async for event in core.generate(tokens, params)]


async def alone(tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    core = tiny.core(pipelined=False)
    try:
        return await collect(core, tokens, params)
    finally:
        await core.close()


MIXED = [
    (prompt(3, 1), GREEDY),
    (prompt(40, 2), SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True)),
    (
        prompt(70, 3),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=-3, max_tokens=9, ignore_eos=True),
    ),
    (
        prompt(1, 4),
        SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=15),
    ),
    (prompt(90, 5), SamplingParams(temperature=0, logit_bias={7: 100.0}, max_tokens=5)),
    (
        prompt(33, 6),
        SamplingParams(temperature=1, min_p=0.1, presence_penalty=1, seed=2**64 - 1, max_tokens=11),
    ),
]


@both
async def test_a_mixed_batch_gives_what_each_gives_alone(pipelined: bool) -> None:
    expected = [await alone(tokens, params) for tokens, params in MIXED]
    core = tiny.core(pipelined=pipelined)
    assert await asyncio.gather(*(collect(core, *request) for request in MIXED)) == expected
    assert core.executor.steps.count(1) < 8  # the requests shared steps
    assert core.scheduler.table.sequences == {}
    await core.close()
    assert core.executor.closed


async def test_places_of_logits_without_use_name_the_last_row_used() -> None:
    """A kernel tells by this that it needs to compute one row of logits alone."""
    core = tiny.core(pipelined=False)
    await collect(core, prompt(3), SamplingParams(temperature=0, max_tokens=1))
    assert core.executor.buffers["logit_rows"].tolist() == [2] * 16
    await core.close()


@both
async def test_a_program_that_samples_fewer_rows_than_a_step_has_takes_turns(pipelined: bool) -> None:
    expected = [await alone(tokens, params) for tokens, params in MIXED]
    description = tiny.manifest()
    program = description.programs[0]
    few = {name: made if name == "step" else made[:1] for name, made in program.functions.items()}
    executor = NumpyExecutor(tiny.CONFIG, tiny.weights(), pages=64, page_size=16, slots=8)
    core = EngineCore(executor, description, replace(program, functions=few), (64,), pipelined=pipelined)
    assert await asyncio.gather(*(collect(core, *request) for request in MIXED)) == expected
    await core.close()


@both
async def test_requests_that_join_and_leave_do_not_disturb_others(pipelined: bool) -> None:
    expected = [await alone(tokens, params) for tokens, params in MIXED]
    core = tiny.core(pipelined=pipelined, slots=3)

    async def late(index: int) -> list[int]:
        for _ in range(index * 3):
            await asyncio.sleep(0.001)
        return await collect(core, *MIXED[index])

    assert await asyncio.gather(*(late(i) for i in range(len(MIXED)))) == expected
    await core.close()


@both
async def test_a_second_turn_through_the_prefix_cache_equals_a_cold_start(pipelined: bool) -> None:
    core = tiny.core(pipelined=pipelined)
    first = prompt(50, 9)
    answer = await collect(core, first)
    second = [*first, *answer, *prompt(9, 10)]
    generation = core.generate(second, GREEDY)
    warm = [event.token async for event in generation]
    assert generation.stats.cached_tokens == 48
    assert warm == await alone(second)
    third = [*second, *warm, 5]
    generation = core.generate(third, GREEDY)
    assert [event.token async for event in generation] == await alone(third)
    assert generation.stats.cached_tokens == (len(third) - 2) // 16 * 16
    await core.close()


async def test_a_shared_prefix_is_computed_once_even_at_the_same_time() -> None:
    core = tiny.core()
    shared = prompt(100, 11)
    prompts = [[*shared, *prompt(5, i)] for i in range(4)]
    generations = [core.generate(p, GREEDY) for p in prompts]
    answers = [[event.token async for event in g] for g in generations]
    assert answers == [await alone(p) for p in prompts]
    assert [g.stats.cached_tokens for g in generations] == [0, 100, 100, 100]
    await core.close()


@both
async def test_preempted_requests_finish_with_the_same_answer(pipelined: bool) -> None:
    params = SamplingParams(temperature=0.8, seed=1, frequency_penalty=0.3, max_tokens=60, ignore_eos=True)
    prompts = [prompt(20, i) for i in range(4)]
    expected = [await alone(p, params) for p in prompts]
    core = tiny.core(pages=12, pipelined=pipelined)  # 192 tokens for 4 requests of 80
    preempted = 0
    original = core.scheduler._preempt

    def count(request: object) -> None:
        nonlocal preempted
        preempted += 1
        original(request)  # type: ignore[arg-type]

    core.scheduler._preempt = count  # type: ignore[method-assign,assignment]
    assert await asyncio.gather(*(collect(core, p, params) for p in prompts)) == expected
    assert preempted > 0
    assert core.scheduler.table.available == 12
    await core.close()


@both
async def test_every_prompt_length_gives_what_a_single_row_a_step_gives(pipelined: bool) -> None:
    core, tokens = tiny.core(pipelined=pipelined), prompt(140, 12)
    slow = tiny.core(pipelined=False)
    object.__setattr__(slow.scheduler.limits, "buckets", (1,))
    params = SamplingParams(temperature=0, max_tokens=1)
    for length in [*range(1, 40), *range(60, 70), *range(124, 141)]:
        core.scheduler.table.clear()
        assert await collect(core, tokens[:length], params) == await collect(slow, tokens[:length], params)
    await core.close()
    await slow.close()


async def test_limits_and_finish_reasons() -> None:
    core = tiny.core()
    events = await _events(core, prompt(150), SamplingParams(temperature=0, ignore_eos=True))
    assert len(events) == 10  # the context of 160 is full
    assert events[-1].finish_reason == "length"
    assert all(event.finish_reason is None for event in events[:-1])
    only_eos = SamplingParams(temperature=0, logit_bias={257: 100.0})
    events = [e async for e in core.generate(prompt(4), only_eos)]
    assert [(e.token, e.finish_reason) for e in events] == [(257, "stop")]
    with pytest.raises(RequestError, match=r"context length is 160 tokens, .* has 160 tokens"):
        core.generate(prompt(160))
    with pytest.raises(RequestError, match="token id 261 at position 1 is outside the vocabulary of 261"):
        core.generate([1, 261])
    with pytest.raises(RequestError, match="empty"):
        core.generate([])
    with pytest.raises(RequestError, match="token id 300 is outside"):
        core.generate([1], SamplingParams(logit_bias={300: 1.0}))
    await core.close()
    with pytest.raises(DeviceError, match="closed"):
        core.generate([1])


async def test_few_pages_shorten_the_context() -> None:
    core = tiny.core(pages=3)
    assert core.context == 48
    with pytest.raises(RequestError, match=r"context length is 48 tokens, .* has 60 tokens"):
        core.generate(prompt(60))
    assert len(await collect(core, prompt(40), SamplingParams(temperature=0, ignore_eos=True))) == 8
    await core.close()


@both
async def test_closing_dropping_and_cancelling_stop_a_request(pipelined: bool) -> None:
    core = tiny.core(pipelined=pipelined)
    endless = SamplingParams(temperature=0, ignore_eos=True)
    closed = core.generate(prompt(5, 1), endless)
    async for _ in closed:
        await closed.aclose()
    assert not core.scheduler.running
    async for _ in core.generate(prompt(5, 2), endless):
        break
    gc.collect()
    task = asyncio.create_task(collect(core, prompt(5, 3), endless))
    other = asyncio.create_task(collect(core, prompt(30, 4)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await other == await alone(prompt(30, 4))
    assert core.scheduler.table.available == 64
    await core.close()


async def test_logprobs_are_those_of_the_raw_logits() -> None:
    core = tiny.core()
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=4, ignore_eos=True)
    plain, events = await asyncio.gather(
        collect(core, prompt(7)), asyncio.create_task(_events(core, prompt(20), params))
    )
    assert plain == await alone(prompt(7))
    for event in events:
        assert event.top_logprobs[0].token == event.token
        assert event.logprob == event.top_logprobs[0].logprob
        assert len(event.top_logprobs) == 4
        assert event.logprob is not None
        assert event.logprob < 0
    await core.close()


async def _events(core: EngineCore, tokens: list[int], params: SamplingParams) -> list[TokenEvent]:
    return [event async for event in core.generate(tokens, params)]


async def test_seeds() -> None:
    core = tiny.core()
    hot = {"temperature": 1.5, "max_tokens": 20, "ignore_eos": True}
    one = await collect(core, prompt(9), SamplingParams(seed=1, **hot))
    assert one == await collect(core, prompt(9), SamplingParams(seed=1, **hot))
    assert one != await collect(core, prompt(9), SamplingParams(seed=2, **hot))
    unseeded = [await collect(core, prompt(9), SamplingParams(**hot)) for _ in range(3)]
    assert len({tuple(tokens) for tokens in unseeded}) == 3
    await core.close()


def test_an_engine_works_in_one_event_loop_after_another() -> None:
    core = tiny.core()
    first = asyncio.run(collect(core, prompt(9)))
    assert asyncio.run(collect(core, prompt(9))) == first
    asyncio.run(core.close())
