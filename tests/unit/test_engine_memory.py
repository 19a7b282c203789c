"""An engine whose device has too little memory for large steps continues with smaller ones; no answer
changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.executors.base import Array
from nearfar.errors import DeviceError, OutOfMemory
from tests.support import tiny
from tests.support.numpy_executor import NumpyExecutor
from tests.unit.test_engine_recovery import MIXED, PAGES, collect, prompt

both = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "lockstep"])
NONE_LEFT = OutOfMemory("the device has no room for the step")


class Narrow(NumpyExecutor):
    """Has memory for steps of `rows` rows: larger ones fail when they are run or, with `late`, when they are
    read.
    """

    def __init__(self, rows: int, error: Exception = NONE_LEFT, late: bool = False) -> None:
        super().__init__(tiny.CONFIG, tiny.weights(), pages=PAGES, page_size=16, slots=8)
        self.rows, self.error, self.late = rows, error, late

    def run(self, function: str, size: int) -> None:
        if function == "step" and size > self.rows and not self.late:
            raise self.error
        super().run(function, size)

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        read, refused = super().fetch(buffer, rows), self.late and self.steps[-1] > self.rows

        def wait() -> Array:
            if refused:
                raise self.error
            return read()

        return wait


def engine(open_one: Callable[[], NumpyExecutor], pipelined: bool = True) -> EngineCore:
    description = tiny.manifest()
    program = description.programs[0]
    return EngineCore(open_one(), description, program, (PAGES,), pipelined=pipelined, reopen=open_one)


async def mixed(core: EngineCore) -> list[list[int]]:
    return await asyncio.gather(*(collect(core, *request) for request in MIXED))


@both
@pytest.mark.parametrize("late", [False, True], ids=["when it is run", "when it is read"])
@pytest.mark.parametrize("error", [NONE_LEFT, MemoryError("no room")], ids=["device", "host"])
@pytest.mark.parametrize("rows", [64, 16, 4, 1])
async def test_no_answer_changes_where_large_steps_have_no_memory(
    rows: int, error: Exception, late: bool, pipelined: bool, caplog: pytest.LogCaptureFixture
) -> None:
    calm = tiny.core()
    expected = await mixed(calm)
    await calm.close()
    core = engine(lambda: Narrow(rows, error, late), pipelined)
    assert core.largest_step == 256
    with caplog.at_level(logging.WARNING):
        assert await mixed(core) == expected
    assert core.largest_step == rows
    told = [record.message for record in caplog.records if "steps of at most" in record.message]
    assert len(told) == [256, 64, 16, 4, 1].index(rows), "once for each size that is given up"
    assert f"steps of at most {rows} rows" in told[-1]
    assert "--kv-memory" in told[-1]
    # For the rest of the engine's life no larger step is tried again.
    epoch = core.epoch
    caplog.clear()
    assert await mixed(core) == expected
    assert core.epoch == epoch
    assert not caplog.records
    assert core.scheduler.table.sequences == {}
    await core.close()


@both
async def test_memory_that_lacks_for_the_smallest_step_is_an_error_and_the_next_request_tries_again(
    pipelined: bool,
) -> None:
    rows = [0]
    core = engine(lambda: Narrow(rows[0]), pipelined)
    with pytest.raises(DeviceError, match="no room for the step"):
        await collect(core, prompt(90), MIXED[0][1])
    assert core.largest_step == 1
    rows[0] = 1
    assert len(await collect(core, prompt(90), MIXED[0][1])) == 20
    await core.close()


async def test_a_device_that_has_no_memory_to_be_opened_again_gives_up_no_step() -> None:
    """The weights had no room, so smaller steps would not help."""
    tries = []

    def open_one() -> NumpyExecutor:
        tries.append(1)
        if len(tries) == 2:
            raise OutOfMemory("no room for the weights")
        return Narrow(64)

    core = engine(open_one)
    with pytest.raises(OutOfMemory, match="for the weights"):
        await collect(core, prompt(140), MIXED[0][1])
    assert core.largest_step == 64
    assert len(await collect(core, prompt(140), MIXED[0][1])) == 20
    await core.close()


async def test_without_a_way_to_open_it_anew_the_error_is_told() -> None:
    description = tiny.manifest()
    core = EngineCore(Narrow(16), description, description.programs[0], (PAGES,))
    with pytest.raises(OutOfMemory, match="no room for the step"):
        await collect(core, prompt(90), MIXED[0][1])
    await core.close()
