"""A failed step begins a new epoch: whichever call of the device fails, later answers equal those of an
engine that never failed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.executors.base import Executor
from nearfar.edge_runtime.snapshots.transfer import capture, restore
from nearfar.errors import DeviceError, DeviceLost, RequestError
from tests.support import tiny
from tests.support.faults import Faults, Faulty
from tests.support.numpy_executor import NumpyExecutor
from tests.support.turns import share

PAGES = 64
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
both = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "lockstep"])


def numpy_executor() -> Executor:
    return NumpyExecutor(tiny.CONFIG, tiny.weights(), pages=PAGES, page_size=16, slots=8)


def engine(
    faults: Faults,
    *,
    pipelined: bool = True,
    reopens: bool = True,
    make: Callable[[], Executor] = numpy_executor,
) -> EngineCore:
    description = tiny.manifest()
    return EngineCore(
        Faulty(make(), faults),
        description,
        description.programs[0],
        (PAGES,),
        pipelined=pipelined,
        reopen=(lambda: Faulty(make(), faults)) if reopens else None,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


class Even:
    """A constraint that allows even tokens only."""

    def allowed(self) -> npt.NDArray[np.uint32]:
        return np.full((261 + 31) // 32, 0x55555555, np.uint32)

    def accept(self, token: int) -> bool:
        return token % 2 == 0


SHARED = prompt(40, 1)
"""Two and a half pages: requests that begin with them share pages and copy one."""

REQUESTS = [
    ([*SHARED, *prompt(3, 2)], GREEDY, None),
    (
        [*SHARED, *prompt(9, 3)],
        SamplingParams(temperature=0.9, seed=5, max_tokens=4, logprobs=2, ignore_eos=True),
        None,
    ),
    (
        prompt(35, 4),
        SamplingParams(temperature=0, logit_bias={7: 9.0}, presence_penalty=1, max_tokens=3, ignore_eos=True),
        None,
    ),
    (prompt(18, 5), GREEDY, Even),
]

Outcome = list[int] | Exception


async def collect(core: EngineCore, number: int) -> Outcome:
    tokens, params, constraint = REQUESTS[number]
    try:
        return [
            event.token async for event in core.generate(tokens, params, constraint() if constraint else None)
        ]
    except Exception as error:
        return error


async def answers(core: EngineCore) -> list[Outcome]:
    return await asyncio.gather(*(collect(core, number) for number in range(len(REQUESTS))))


async def first_and_again(core: EngineCore) -> tuple[list[Outcome], list[Outcome]]:
    """Run all requests together, and again, when their cached prefixes are used."""
    return await answers(core), await answers(core)


async def clean(pipelined: bool) -> tuple[list[Outcome], int, int]:
    """The answers without a fault, and the numbers of calls for opening and in all."""
    faults = Faults(None)
    core = engine(faults, pipelined=pipelined)
    opening = len(faults.calls)
    expected, again = await first_and_again(core)
    assert again == expected
    assert "copy_page" in faults.calls
    await core.close()
    return expected, opening, len(faults.calls)


@both
async def test_after_a_fault_at_any_call_every_answer_is_that_of_a_clean_engine(pipelined: bool) -> None:
    expected, opening, calls = await clean(pipelined)
    for at in share(range(opening, calls), 2):
        faults = Faults(at)
        core = engine(faults, pipelined=pipelined)
        outcomes = [*await first_and_again(core), await answers(core)]
        where = f"call {at}: {faults.calls[at]}"
        for outcome in outcomes:
            for given, wanted in zip(outcome, expected, strict=True):
                assert given == wanted or (isinstance(given, DeviceError) and "injected" in str(given)), where
        assert outcomes[-1] == expected, where
        assert not faults.misused, where
        assert core.epoch == 1, where
        assert core.scheduler.table.available == PAGES, where
        await core.close()


@both
async def test_a_device_lost_at_any_call_costs_no_answer(pipelined: bool) -> None:
    expected, opening, calls = await clean(pipelined)
    for at in range(opening, calls, 3):
        faults = Faults(at, DeviceLost)
        core = engine(faults, pipelined=pipelined)
        assert await first_and_again(core) == (expected, expected), f"call {at}: {faults.calls[at]}"
        assert not faults.misused
        await core.close()


@both
async def test_a_device_that_cannot_be_opened_again_is_refused_by_name(pipelined: bool) -> None:
    _, opening, calls = await clean(pipelined)
    for at in range(opening, calls, 7):
        faults = Faults(at)
        core = engine(faults, pipelined=pipelined, reopens=False)
        await first_and_again(core)
        with pytest.raises(DeviceError, match=r"injected at call .*load the artifact again"):
            core.generate([1], GREEDY)
        with pytest.raises(DeviceError, match="load the artifact again"):
            await restore(core, prompt(16), {})
        assert not faults.misused
        await core.close()
        with pytest.raises(DeviceError, match="closed"):
            core.generate([1], GREEDY)


async def test_a_fault_while_the_device_is_opened_again_fails_the_request_and_the_next_one_tries_again() -> (
    None
):
    expected, opening, _ = await clean(True)
    faults = Faults(opening + 20)
    core = engine(faults)
    await answers(core)
    assert faults.happened
    faults.at = len(faults.calls)  # the fault is in the first write of the reopened device
    failed = await answers(core)
    assert all(isinstance(outcome, DeviceError) for outcome in failed)
    assert await answers(core) == expected
    assert not faults.misused
    await core.close()


async def test_a_snapshot_beside_a_failing_step_holds_no_page_of_the_epoch_before() -> None:
    calm = engine(Faults(None))
    tokens = prompt(64, 9)
    content = await capture(calm, tokens)
    await calm.close()

    for at in range(8, 60):
        faults = Faults(at)
        core = engine(faults)
        running = asyncio.create_task(answers(core))
        await asyncio.gather(restore(core, tokens, content), return_exceptions=True)
        await running
        assert await answers(core) == await answers(core)
        saved = await capture(core, tokens)
        assert all(np.array_equal(saved[name], content[name]) for name in content), (
            f"call {at}: {faults.calls[at]}"
        )
        await core.close()


async def test_an_executor_that_cannot_be_prepared_is_closed_and_leaves_no_thread() -> None:
    description, made = tiny.manifest(), Faulty(numpy_executor(), Faults(0))
    before = set(threading.enumerate())
    with pytest.raises(DeviceError, match="injected at call 0"):
        EngineCore(made, description, description.programs[0], (PAGES,))
    assert made.closed
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may end meanwhile


class Broken(Even):
    """A constraint that raises, or forbids everything, at its second token."""

    def __init__(self, where: str) -> None:
        self.where, self.count = where, 0

    def allowed(self) -> npt.NDArray[np.uint32]:
        if self.count and self.where == "allowed":
            raise RuntimeError("the matcher broke")
        row = super().allowed()
        return row * np.uint32(0) if self.count and self.where == "nothing" else row

    def accept(self, token: int) -> bool:
        self.count += 1
        if self.where == "accept":
            raise RuntimeError("the matcher broke")
        return super().accept(token)


@both
@pytest.mark.parametrize("where", ["allowed", "nothing", "accept"])
async def test_a_constraint_that_breaks_fails_its_own_request_only(where: str, pipelined: bool) -> None:
    expected, _, _ = await clean(pipelined)
    core = engine(Faults(None), pipelined=pipelined)
    neighbours = asyncio.create_task(answers(core))
    with pytest.raises(RequestError) as error:
        async for _event in core.generate(prompt(33, 8), GREEDY, Broken(where)):
            pass
    assert error.value.param == "response_format"
    assert await neighbours == expected
    assert core.epoch == 0
    assert await answers(core) == expected
    await core.close()


class Blocking(Even):
    """A constraint whose mask takes as long as the test wants."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def allowed(self) -> npt.NDArray[np.uint32]:
        self.asked.set()
        assert self.released.wait(20), "the event loop stood still while a mask was made"
        return super().allowed()

    def accept(self, token: int) -> bool:
        assert self.released.wait(20), "the event loop stood still while a token was followed"
        return super().accept(token)


@both
async def test_a_slow_mask_does_not_hold_the_event_loop(pipelined: bool) -> None:
    core, slow = engine(Faults(None), pipelined=pipelined), Blocking()
    reading = asyncio.create_task(_tokens(core, slow))
    # This coroutine runs while the mask is being made, and only this coroutine ends that.
    await asyncio.wait_for(asyncio.to_thread(slow.asked.wait), 20)
    slow.released.set()
    assert len(await reading) == 3
    await core.close()


async def _tokens(core: EngineCore, constraint: Even) -> list[int]:
    return [event.token async for event in core.generate(prompt(33, 8), GREEDY, constraint)]


class Overflowing(NumpyExecutor):
    """Computes logits that are not finite for the sequence with `token` in one of its rows."""

    def __init__(self, token: int) -> None:
        super().__init__(tiny.CONFIG, tiny.weights(), pages=PAGES, page_size=16, slots=8)
        self.token = token

    def _step(self, size: int) -> None:
        super()._step(size)
        b = self.buffers
        hit = set(
            b["slots"][:size][(b["tokens"][:size] == self.token) & (b["positions"][:size] >= 0)].tolist()
        )
        for row, source in enumerate(b["logit_rows"][: min(size, 16)]):
            if b["slots"][source] in hit:
                b["logits"][row] = np.nan


@both
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(temperature=1, seed=1, max_tokens=3, logprobs=1)],
    ids=["greedy", "sample"],
)
async def test_logits_that_are_not_finite_fail_their_request_and_no_other(
    params: SamplingParams, pipelined: bool
) -> None:
    bad = 258
    used = {token for tokens, _, _ in REQUESTS for token in tokens}
    assert bad not in used
    expected, _, _ = await clean(pipelined)
    core = engine(Faults(None), pipelined=pipelined, make=lambda: Overflowing(bad))
    neighbours = asyncio.create_task(answers(core))
    with pytest.raises(DeviceError, match=r"logits .* not finite.*f32"):
        async for _event in core.generate([*prompt(20, 7), bad], params):
            pass
    assert await neighbours == expected
    assert core.epoch == 0
    assert not any(bad in tokens for _, tokens, _ in core.scheduler.table.index.nodes())
    await core.close()
