"""An engine over layers with recurrent states: texts equal those of a model that recomputes everything;
prefixes continue from borders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.edge_runtime import AsyncEngine
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.step.reading import read_model
from tests.support import tiny
from tests.support.step_reference import Sequence as Kept
from tests.support.step_reference import StepReference
from tests.unit.test_windows import GREEDY, collect, nothing_held, prompt

CONFIG: dict[str, Any] = {
    **tiny.CONFIG, "model_type": "qwen3_5_text", "num_hidden_layers": 2, "max_position_embeddings": 1024,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "partial_rotary_factor": 0.5, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 4, "eos_token_id": None,
}  # fmt: skip
pipelining = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "lockstep"])
COUNT = 20
"""Tokens of an answer: more than a page."""
LONG = replace(GREEDY, max_tokens=COUNT)


@cache
def weights() -> tiny.Weights:
    """Random tensors, large enough that the argmax is not a close call."""
    rng, made = np.random.default_rng(0), dict[str, Any]()
    for param in read_model(CONFIG).model.step.params:
        for name, shape in param.expected().items():
            scale = 1.5 / shape[-1] ** 0.5 if len(shape) > 1 and "embed" not in name else 1.0
            made[name] = rng.normal(0, scale, shape).astype(np.float32)
    return made


@cache
def expected(tokens: tuple[int, ...], count: int = COUNT) -> list[int]:
    """Greedy tokens of the reference, in steps of one sequence without a paged cache."""
    reference, memory, answer = StepReference(read_model(CONFIG).model, weights()), Kept(), list[int]()
    new = list(tokens)
    for _ in range(count):
        memory.positions = np.arange(len(tokens) + len(answer) - len(new), len(tokens) + len(answer))
        answer.append(int(reference.run(np.array(new), memory.positions, memory)[-1].argmax()))
        new = answer[-1:]
    return answer


def opened(pages: int | Sequence[int] = (200, 100, 40), **options: Any) -> EngineCore:
    """An engine with groups for attention, the convolution and the states."""
    return tiny.core(config=CONFIG, made=weights(), pages=pages, **options)


async def check(core: EngineCore, tokens: list[int], cached: int | None = None) -> list[int]:
    answer, found = await collect(core, tokens, LONG)
    assert answer == expected(tuple(tokens)), len(tokens)
    assert cached is None or found == cached
    return answer


@pipelining
async def test_the_next_turn_computes_at_most_a_page_of_what_was_there(pipelined: bool) -> None:
    """Prompts of several steps, beyond the stride of 256; the conversation continues after them and their
    answers.
    """
    core = opened(pipelined=pipelined)
    for length in (17, 96, 300):
        talk = prompt(length, length)
        talk += await check(core, talk, 0)
        for turn in range(2):
            computed = len(talk) - 1  # the last token of an answer is sampled, and not fed
            talk += prompt(5 + turn, turn)
            answer, cached = await collect(core, talk, LONG)
            assert computed - 16 <= cached <= computed
            assert answer == expected(tuple(talk))
            talk += answer
        assert nothing_held(core)


@pipelining
async def test_another_end_of_a_prompt_starts_at_a_border(pipelined: bool) -> None:
    core = opened(pipelined=pipelined)
    talk = prompt(300, 1)
    await check(core, talk, 0)
    await check(core, talk, 288)
    await check(core, [*talk[:290], *prompt(30, 2)], 288)
    await check(core, [*talk[:270], *prompt(30, 3)], 256)
    await check(core, [*talk[:250], *prompt(30, 4)], 0)


@pipelining
@pytest.mark.parametrize("pages", [(200, 100, 40), (48, 60, 9)], ids=["room", "little"])
async def test_requests_that_share_beginnings_give_the_same_texts(
    pipelined: bool, pages: tuple[int, ...]
) -> None:
    """Ten requests at once, some of which begin alike, in pools that hold all or a few of them: forks,
    eviction, waiting.
    """
    shared = prompt(150, 9)
    prompts = [prompt(length, length) for length in (30, 200, 90, 301)]
    prompts += [[*shared, *prompt(length, length)] for length in (5, 33, 90, 140)]
    prompts += [prompts[-1], prompts[0]]
    core = opened(pages, pipelined=pipelined)
    await asyncio.gather(*(check(core, tokens) for tokens in prompts))
    await asyncio.gather(*(check(core, tokens) for tokens in prompts))
    assert nothing_held(core)
    assert not any(core.scheduler.table.sequences)


async def test_long_answers_keep_the_borders_of_prompts() -> None:
    """The border in each page of an answer replaces the previous one; those at the ends of prompts stay."""
    core = opened((400, 100, 12))
    first = prompt(60, 1)
    await check(core, first, 0)
    for seed in range(2):
        await collect(core, prompt(40, 10 + seed), replace(GREEDY, max_tokens=200))
    await check(core, first, 48)


async def test_a_snapshot_holds_the_state_behind_it(tmp_path: Path) -> None:
    def engine(**options: Any) -> AsyncEngine:
        return AsyncEngine(opened(**options), None)  # type: ignore[arg-type]

    for length in (300, 256):
        tokens, file = prompt(length, length), tmp_path / f"{length}.snap"
        async with engine() as saving:
            assert (await saving.save_cache(file, tokens=tokens)).tokens == length // 16 * 16
        async with engine() as loading:
            await check(loading.core, prompt(40, 5))  # so that the prefix lands on other pages
            await loading.load_cache(file)
            assert nothing_held(loading.core)
            await check(loading.core, [*tokens, 7], length // 16 * 16)
