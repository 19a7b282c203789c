"""An engine whose device is lost while requests run: their texts equal those of a device that was
never lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from nearfar.edge_runtime.engine.core import MOST_LOSSES, EngineCore
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.executors.base import Array
from nearfar.edge_runtime.snapshots.transfer import capture, restore
from nearfar.errors import DeviceError, DeviceLost
from tests.support import tiny
from tests.support.numpy_executor import NumpyExecutor

PAGES = 64


class Fragile(NumpyExecutor):
    """Is lost after `life` runs, and then stays lost."""

    def __init__(self, life: int) -> None:
        super().__init__(tiny.CONFIG, tiny.weights(), pages=PAGES, page_size=16, slots=8)
        self.life = life

    def run(self, function: str, size: int) -> None:
        self.life -= 1
        self._check()
        super().run(function, size)

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        read = super().fetch(buffer, rows)

        def wait() -> Array:
            self._check()
            return read()

        return wait

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        self._check()
        return super().read_pages(group, pages)

    def _check(self) -> None:
        if self.life < 0:
            raise DeviceLost("the device was lost")


def engine(lives: list[int], pipelined: bool = True) -> EngineCore:
    """An engine whose executors are lost after these numbers of runs, one after the other; the last one is
    never lost.
    """
    made = iter([*lives, 10**9])
    description = tiny.manifest()
    return EngineCore(
        Fragile(next(made)),
        description,
        description.programs[0],
        (PAGES,),
        pipelined=pipelined,
        reopen=lambda: Fragile(next(made)),
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


async def collect(core: EngineCore, tokens: list[int], params: SamplingParams) -> list[int]:
    return [event.token async for event in core.generate(tokens, params)]


MIXED = [
    (prompt(40, 2), SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True)),
    (
        prompt(1, 4),
        SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=15),
    ),
    (prompt(90, 5), SamplingParams(temperature=0, logit_bias={7: 100.0}, max_tokens=5)),
    (prompt(33, 6), SamplingParams(temperature=1, min_p=0.1, presence_penalty=1, seed=9, max_tokens=11)),
]


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "lockstep"])
@pytest.mark.parametrize("lives", [[0], [1], [2], [5], [9, 14], [12, 3, 0, 20]], ids=str)
async def test_requests_go_on_after_the_device_was_lost(lives: list[int], pipelined: bool) -> None:
    calm = engine([])
    expected = await asyncio.gather(*(collect(calm, *request) for request in MIXED))
    await calm.close()
    core = engine(lives, pipelined)
    assert await asyncio.gather(*(collect(core, *request) for request in MIXED)) == expected
    assert core.epoch == len(lives)
    # The prefix index starts again with the device, so what it finds now was computed there.
    assert await collect(core, *MIXED[2]) == expected[2]
    assert core.scheduler.table.sequences == {}
    assert core.scheduler.table.available == PAGES
    await core.close()


async def test_a_device_that_is_lost_again_and_again_fails_the_requests_and_only_those() -> None:
    core = engine([0] * (MOST_LOSSES + 1))
    with pytest.raises(DeviceLost):
        await collect(core, *MIXED[0])
    assert core.epoch == MOST_LOSSES + 1
    assert len(await collect(core, *MIXED[0])) == 20, "the next request opens the device again"
    await core.close()


async def test_without_a_way_to_open_it_anew_the_loss_is_an_error() -> None:
    description = tiny.manifest()
    core = EngineCore(Fragile(3), description, description.programs[0], (PAGES,))
    with pytest.raises(DeviceLost):
        await collect(core, *MIXED[0])
    await core.close()


async def test_a_device_that_cannot_be_opened_anew_is_tried_again_with_the_next_request() -> None:
    description = tiny.manifest()
    tries = []

    def reopen() -> Fragile:
        tries.append(1)
        if len(tries) == 1:
            raise DeviceError("the device is gone")
        return Fragile(10**9)

    core = EngineCore(Fragile(3), description, description.programs[0], (PAGES,), reopen=reopen)
    with pytest.raises(DeviceError, match="is gone"):
        await collect(core, *MIXED[0])
    assert len(await collect(core, *MIXED[0])) == 20
    await core.close()


async def test_a_snapshot_that_the_loss_runs_through_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    calm = engine([])
    tokens = prompt(64, 1)
    content = await capture(calm, tokens)
    await calm.close()

    core = engine([])
    loading = asyncio.create_task(restore(core, tokens, content))
    # the test waits until pages are held, because they are being written
    while not core.scheduler.table.allocators[0].refs[0]:
        await asyncio.sleep(0)
    core._end_epoch()
    with pytest.raises(DeviceLost, match="load it again"):
        await loading
    assert core.scheduler.table.available == PAGES
    assert not list(core.scheduler.table.index.nodes())
    await restore(core, tokens, content)
    assert len(list(core.scheduler.table.index.nodes())) == 4
    await core.close()
