"""An engine over layers with windows: texts equal those with unlimited memory, pages are bounded, the context
is not cut.
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
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.errors import SnapshotError
from nearfar.step.reading import read_model
from tests.support import tiny
from tests.support.step_reference import Sequence as Kept
from tests.support.step_reference import StepReference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WINDOW = 40
HYBRID: dict[str, Any] = {
    **tiny.CONFIG, "model_type": "mistral", "num_hidden_layers": 3, "max_position_embeddings": 1024,
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
EVERYWHERE = {**HYBRID, "layer_types": None}
both = pytest.mark.parametrize("config", [HYBRID, EVERYWHERE], ids=["hybrid", "everywhere"])
pipelining = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "lockstep"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def expected(config: dict[str, Any], tokens: Sequence[int], count: int = 12) -> list[int]:
    """Greedy tokens of the reference, which keeps everything."""
    return answered(config is HYBRID, tuple(tokens), count)


@cache
def answered(hybrid: bool, tokens: tuple[int, ...], count: int) -> list[int]:
    """The reference's answer, computed once for all engines."""
    config = HYBRID if hybrid else EVERYWHERE
    reference, memory = StepReference(read_model(config).model, tiny.weights(config)), Kept()
    new, answer = list(tokens), list[int]()
    for _ in range(count):
        memory.positions = np.arange(len(tokens) + len(answer) - len(new), len(tokens) + len(answer))
        answer.append(int(reference.run(np.array(new), memory.positions, memory)[-1].argmax()))
        new = answer[-1:]
    return answer


async def collect(
    core: EngineCore, tokens: Sequence[int], params: SamplingParams = GREEDY
) -> tuple[list[int], int]:
    """Tokens of the answer, and the number of prompt tokens that were in the cache."""
    generation = core.generate(tokens, params)
    return [event.token async for event in generation], generation.stats.cached_tokens


def nothing_held(core: EngineCore) -> bool:
    return not any(any(allocator.refs) for allocator in core.scheduler.table.allocators)


class Most:
    """Records the most pages that a group had in use."""

    def __init__(self, core: EngineCore) -> None:
        table, take = core.scheduler.table, core.scheduler.table._take
        self.held = [0] * len(table.windows)

        def counted(group: int) -> int:
            page = take(group)
            in_use = sum(refs > 0 for refs in table.allocators[group].refs)
            self.held[group] = max(self.held[group], in_use)
            return page

        table._take = counted  # type: ignore[method-assign]


@both
@pipelining
async def test_texts_are_those_of_the_reference_and_pages_are_bounded(
    config: dict[str, Any], pipelined: bool
) -> None:
    core = tiny.core(config=config, pages=64, slots=2, pipelined=pipelined)
    assert core.context == 1024
    most = Most(core)
    for length in (20, 100, 300):
        assert (await collect(core, prompt(length)))[0] == expected(config, prompt(length)), length
        assert nothing_held(core)
    window = core.scheduler.table.windows[-1]
    assert most.held[-1] <= window.most_columns(512 if pipelined else 256, 1024)
    if config is HYBRID:
        assert most.held[0] == -(-312 // 16)


@both
async def test_the_context_is_not_cut_by_a_pool_that_holds_little_more_than_a_window(
    config: dict[str, Any],
) -> None:
    least = -(-(WINDOW + 254) // 16) + 1
    core = tiny.core(config=config, pages=(64, least) if config is HYBRID else (least,), slots=2)
    assert core.context == 1024
    most = Most(core)
    tokens, _ = await collect(core, prompt(700), replace(GREEDY, max_tokens=300))
    assert len(tokens) == 300
    assert tokens[:3] == expected(config, prompt(700), 3)
    assert most.held[-1] <= least


async def test_a_pool_smaller_than_a_window_bounds_the_context_as_if_there_were_none() -> None:
    core = tiny.core(config=HYBRID, pages=(64, 4), slots=2)
    assert core.context == 64
    assert (await collect(core, prompt(40)))[0] == expected(HYBRID, prompt(40))


@both
@pipelining
async def test_requests_that_share_and_wait_for_windows_give_the_same_texts(
    config: dict[str, Any], pipelined: bool
) -> None:
    """Eight requests, some of which begin alike, in pools that hold two or three of them."""
    shared = prompt(150, 9)
    prompts = [prompt(length, length) for length in (30, 200, 90, 301)]
    prompts += [[*shared, *prompt(length, length)] for length in (5, 33, 90, 140)]
    core = tiny.core(config=config, pages=48, slots=8, pipelined=pipelined)
    found = await asyncio.gather(*(collect(core, tokens) for tokens in prompts))
    for tokens, (answer, _) in zip(prompts, found, strict=True):
        assert answer == expected(config, tokens), len(tokens)
    assert nothing_held(core)


@both
async def test_a_conversation_goes_on_from_its_window_and_an_evicted_one_is_computed_again(
    config: dict[str, Any],
) -> None:
    core = tiny.core(config=config, pages=64, slots=2)
    first = prompt(200)
    answer, cached = await collect(core, first)
    assert cached == 0
    longer = [*first, *answer, *prompt(20, 1)]
    again, cached = await collect(core, longer)
    assert cached == 208, "whole pages of the prompt and the answer"
    assert again == expected(config, longer)
    table = core.scheduler.table
    while table.index.idle_count(len(table.windows) - 1) > 2:  # only pages of windowed groups are evicted
        table.allocators[-1].free(table.index.evict(len(table.windows) - 1))
    third = [*longer, *prompt(20, 2)]
    text, cached = await collect(core, third)
    assert cached == 0
    assert text == expected(config, third)


@pytest.mark.parametrize("config", [HYBRID, EVERYWHERE], ids=["hybrid", "everywhere"])
async def test_a_snapshot_holds_of_windows_only_the_last_pages(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    def engine(**options: Any) -> AsyncEngine:
        return AsyncEngine(tiny.core(config=config, **options), None)  # type: ignore[arg-type]

    tokens = prompt(300)
    async with engine() as first:
        made = await first.save_cache(tmp_path / "a.snap", tokens=tokens)
    whole = made.tokens * 2 * 2 * 8 * 4  # keys and values, heads, head_dim, float32
    window = 3 * 16 * 2 * 2 * 8 * 4  # three pages hold the 39 positions before the next row
    layers = (1, 2) if config is HYBRID else (0, 3)
    assert made.tokens == 288
    assert abs(made.bytes - layers[0] * whole - layers[1] * window - 4 * 288) < 2000, "the rest is the header"
    async with engine() as warm, engine(page_size=32) as coarse, engine(page_size=8) as fine:
        # another prompt first, so that the prefix lands on other pages
        await collect(warm.core, prompt(40, 5))
        await warm.load_cache(tmp_path / "a.snap")
        assert nothing_held(warm.core)
        assert await collect(warm.core, tokens) == (expected(config, tokens), 288)
        text, cached = await collect(warm.core, [*tokens[:200], 1])
        assert cached == 0, "the pages before the window are not there"
        assert text == expected(config, [*tokens[:200], 1])
        await fine.load_cache(tmp_path / "a.snap")
        assert (await collect(fine.core, tokens)) == (expected(config, tokens), 288)
        with pytest.raises(
            SnapshotError, match=r"\[2, 48, 8\], this cache needs \[2, 288, 8\] or the last 64 of the tokens"
        ):
            await coarse.load_cache(tmp_path / "a.snap")
