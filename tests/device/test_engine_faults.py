"""The device of a real artifact fails at every call in turn: later answers equal those of a device that never
failed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from nearfar.edge_runtime import devices
from nearfar.edge_runtime.artifact.loading import load
from nearfar.edge_runtime.artifact.options import LoadOptions
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.errors import DeviceError
from tests.support.backends import Lab
from tests.support.faults import Faults, Faulty

OPTIONS = LoadOptions(device="cpu", kv_memory="16MB", threads=1, verify=False)
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SHARED = [1, *range(40, 80)]
REQUESTS = [
    ([*SHARED, 7], GREEDY),
    (
        [*SHARED, 9, 11],
        SamplingParams(
            temperature=0.8, seed=3, frequency_penalty=0.5, max_tokens=3, logprobs=1, ignore_eos=True
        ),
    ),
    ([1, *range(200, 235)], GREEDY),
]


async def answers(core: EngineCore) -> list[Any]:
    async def one(tokens: list[int], params: SamplingParams) -> list[int]:
        return [event.token async for event in core.generate(tokens, params)]

    return await asyncio.gather(*(one(*request) for request in REQUESTS), return_exceptions=True)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[Faults], None]:
    """A function that makes every cpu device opened from then on fail as Faults says."""

    def arm(faults: Faults) -> None:
        device = devices.device("cpu")
        opener = getattr(device.open, "original", device.open)

        def open_faulty(*args: Any) -> Faulty:
            return Faulty(opener(*args), faults)

        open_faulty.original = opener  # type: ignore[attr-defined]
        changed = dataclasses.replace(device, open=open_faulty)
        monkeypatch.setattr("nearfar.edge_runtime.executors.cpu.DEVICE", changed)

    return arm


async def test_after_a_fault_at_any_call_of_the_cpu_every_answer_is_right(
    lab: Lab, opened: Callable[[Faults], None]
) -> None:
    path = lab.artifact("stories", "cpu")
    faults = Faults(None)
    opened(faults)
    core, _ = load(path, OPTIONS)
    first = len(faults.calls)
    expected = await answers(core)
    assert await answers(core) == expected
    calls = len(faults.calls)
    for at in range(first, calls):
        faults.calls.clear()
        faults.at = at - first  # the call of this round that fails
        for given, wanted in zip(await answers(core), expected, strict=True):
            assert given == wanted or isinstance(given, DeviceError), at
        await answers(core)
        faults.at = None
        assert await answers(core) == expected, f"fault at call {at}"
        assert not faults.misused
    assert core.epoch >= (calls - first) // 2
    await core.close()


def test_an_engine_that_cannot_be_made_gives_its_device_back(
    lab: Lab, opened: Callable[[Faults], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Faulty] = []
    original = Faulty.__init__

    def record(self: Faulty, *args: Any) -> None:
        original(self, *args)
        made.append(self)

    monkeypatch.setattr(Faulty, "__init__", record)
    opened(Faults(0))
    with pytest.raises(DeviceError, match="injected at call 0"):
        load(lab.artifact("stories", "cpu"), OPTIONS)
    assert [each.closed for each in made] == [True]
