"""The meaning of "ready", and the progress that a waiting caller sees: kernels, their first run, the computed
part of a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from nearfar.edge_runtime.artifact.options import LoadOptions
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.executors.compiling import Compiler, unfinished
from nearfar.edge_runtime.progress import Progress, Teller
from nearfar.errors import DeviceError, OutOfMemory, RequestError
from tests.support import tiny
from tests.support.numpy_executor import NumpyExecutor
from tests.unit.test_compiling import kernel
from tests.unit.test_engine import GREEDY, MIXED, collect, prompt

PAGES = 64


class Lazy(NumpyExecutor):
    """Compiles a kernel for each run, and records where the wait was: in `run`, as with some drivers, or
    before it.
    """

    def __init__(self, largest: int = 256) -> None:
        super().__init__(tiny.CONFIG, tiny.weights(), pages=PAGES, page_size=16, slots=8)
        self.compiled: list[str] = []
        self.first: list[tuple[str, int]] = []
        self._largest = largest
        self.compiler = Compiler(lambda name, _: self.compiled.append(name), 1)

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        return () if later else unfinished(self.compiler.begin([kernel(f"{function} {size}")]))

    def run(self, function: str, size: int) -> None:
        if function == "step" and size > self._largest:
            raise OutOfMemory(f"no room for {size} rows")
        if (function, size) not in self.first:
            self.first.append((function, size))
        super().run(function, size)

    def close(self) -> None:
        self.compiler.close()
        super().close()


def engine(largest: int = 256) -> EngineCore:
    description = tiny.manifest()
    return EngineCore(
        Lazy(largest), description, description.programs[0], (PAGES,), reopen=lambda: Lazy(largest)
    )


def lazy(core: EngineCore) -> Lazy:
    assert isinstance(core.executor, Lazy)
    return core.executor


async def test_an_engine_that_is_ready_compiles_and_runs_nothing_for_the_first_time() -> None:
    calm = tiny.core()
    expected = await asyncio.gather(*(collect(calm, *request) for request in MIXED))
    await calm.close()
    core, told = engine(), list[Progress]()
    core.tell(Teller(told.append))
    await core.make_ready("all")
    compiled, first = list(lazy(core).compiled), list(lazy(core).first)
    assert {event.phase for event in told} == {"kernels", "warming"}
    assert told[-1].done == told[-1].total == len(first)
    told.clear()
    assert await asyncio.gather(*(collect(core, *request) for request in MIXED)) == expected
    assert (lazy(core).compiled, lazy(core).first) == (compiled, first)
    assert "kernels" not in {event.phase for event in told}
    await core.close()


async def test_ready_to_decode_leaves_the_kernels_of_prompts_to_their_prompt() -> None:
    core = engine()
    await core.make_ready("decode")
    assert [name for name, _ in lazy(core).first].count("step") == 1
    first = list(lazy(core).first)
    assert len(await collect(core, prompt(1), GREEDY)) == 12
    assert lazy(core).first == first
    await collect(core, prompt(40), GREEDY)
    assert lazy(core).first != first
    await core.close()


async def test_large_steps_without_memory_are_given_up_before_anybody_asks() -> None:
    core = engine(largest=16)
    await core.make_ready("all")
    assert core.largest_step == 16
    epoch = core.epoch
    assert len(await collect(core, prompt(90), GREEDY)) == 12
    assert core.epoch == epoch
    await core.close()


async def test_a_kernel_that_does_not_compile_is_told_by_the_load() -> None:
    core = engine()

    def refuse(name: str, _: object) -> None:
        raise DeviceError(f"the driver refuses {name}")

    lazy(core).compiler = Compiler(refuse, 1)
    with pytest.raises(DeviceError, match="the driver refuses"):
        await core.make_ready("all")
    await core.close()


async def test_it_is_told_how_much_of_a_prompt_is_read_and_the_last_before_its_token() -> None:
    core, told = tiny.core(), list[Progress]()
    core.tell(Teller(told.append))
    tokens = prompt(90)
    generation = core.generate(tokens, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    await anext(generation)
    assert told[0] == Progress("prompt", 0, 90)
    assert told[-1] == Progress("prompt", 90, 90)
    assert told[-1].over
    assert [event.over for event in told].count(True) == 1
    steps = [event.done for event in told]
    assert steps == sorted(steps)
    assert len(steps) > 2
    told.clear()
    assert len([event async for event in generation]) == 2
    assert told == []
    await collect(core, [*tokens, 5], GREEDY)  # most of the prompt is in the cache
    assert told[0].done >= 80
    await core.close()


async def test_a_request_that_goes_while_its_prompt_is_read_ends_what_is_told() -> None:
    core, told = tiny.core(), list[Progress]()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(progress: Progress) -> None:
        told.append(progress)
        loop.call_soon_threadsafe(begun.set)

    core.tell(Teller(tell))
    generation = core.generate(prompt(120), GREEDY)
    await begun.wait()
    await generation.aclose()
    await collect(core, prompt(2), GREEDY)
    assert told[-1].over
    await core.close()


async def test_a_callback_that_fails_is_left_alone_and_the_answer_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def tell(progress: Progress) -> None:
        calls.append(progress)
        raise ValueError("the page is gone")

    core = tiny.core()
    core.tell(Teller(tell))
    assert len(await collect(core, prompt(90), GREEDY)) == 12
    assert len(calls) == 1
    assert "the callback for progress failed" in caplog.text
    await core.close()


def test_what_ready_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEARFAR_READY")
    assert LoadOptions().ready == "all"
    monkeypatch.setenv("NEARFAR_READY", "decode")
    assert LoadOptions().ready == "decode"
    monkeypatch.setenv("NEARFAR_READY", "0")
    with pytest.raises(RequestError, match="must be all, decode or no, not '0'"):
        LoadOptions()
    with pytest.raises(RequestError, match="not 'yes'"):
        LoadOptions(ready="yes")  # type: ignore[arg-type]
