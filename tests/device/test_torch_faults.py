"""A failed step of the torch engine ends its process, and with it the cache: later answers are computed
again.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from nearfar.errors import EngineError
from nearfar.fallback_server.backend import TokenRequest
from nearfar.fallback_server.torch_engine import TorchBackend, TorchOptions
from tests.shared_data import shared_data
from tests.support.torch_rig import GREEDY, Rig
from tests.support.turns import share

FAULTS = """
import os, sys
if "nearfar.fallback_server.torch_engine.worker" in sys.orig_argv:
    from nearfar.fallback_server.torch_engine.model import PagedModel
    plan, forward, left = os.environ["NEARFAR_TEST_FAULT"], PagedModel.forward, [None]

    def faulty(self, batch, rows):
        if os.path.exists(plan):
            kind, count = open(plan).read().split()
            left[0] = int(count) if left[0] is None else left[0] - 1
            if left[0] == 0:
                os.remove(plan)
                left[0] = None
                if kind == "raise":
                    raise RuntimeError("CUDA error: an injected fault")
                return forward(self, batch, rows) * float("nan")
        return forward(self, batch, rows)

    PagedModel.forward = faulty
"""


class Injected(Exception):
    """The error that the model raises."""


SHARED = tuple(range(40, 90))


@pytest.fixture
def stories() -> Path:
    return shared_data("models", "stories260K")


def requests(turn: str) -> list[TokenRequest]:
    """Prompts longer than a page, two of them with the same beginning."""
    prompts = [(1, *SHARED, 7), (1, *SHARED, 9, 11), (1, *range(200, 235))]
    return [TokenRequest(f"{turn}-{i}", prompt, 4, GREEDY) for i, prompt in enumerate(prompts)]


async def answers(backend: TorchBackend, turn: str) -> list[Any]:
    async def one(request: TokenRequest) -> list[int | None]:
        return [event.token async for event in backend.submit(request)]

    return await asyncio.gather(*(one(request) for request in requests(turn)), return_exceptions=True)


def test_no_call_of_the_model_may_fail_unnoticed(stories: Path) -> None:
    want, calls = Rig(stories).tokens(requests("a")), 0
    while True:
        rig, left = Rig(stories), [calls]
        forward = rig.engine.model.forward

        def faulty(batch: Any, rows: Any, forward: Any = forward, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Injected
            return forward(batch, rows)

        rig.engine.model = type(
            "Faulty",
            (),
            {
                "forward": staticmethod(faulty),
                "facts": rig.engine.model.facts,
                "device": rig.engine.model.device,
            },
        )()
        with contextlib.suppress(Injected):
            assert rig.tokens(requests("a")) == want
            break
        calls += 1
    assert calls >= 4


async def test_after_a_fault_every_answer_is_that_of_a_clean_engine(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has one of three calls: each fault starts a process, which imports torch for 5 CPU seconds."""
    want, plan = Rig(stories).tokens(requests("want")), tmp_path / "plan"
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NEARFAR_TEST_FAULT", str(plan))
    backend = await TorchBackend.load(stories, TorchOptions(device="cpu", threads=1, backoff_first=0.01))
    try:
        assert await answers(backend, "clean") == want
        for restarts, call in enumerate(share((0, 2, 4), 3), 1):
            plan.write_text(f"raise {call}")
            for given, right in zip(await answers(backend, f"fault{call}"), want, strict=True):
                assert given == right or isinstance(given, EngineError)
            assert await answers(backend, f"after{call}") == want
            assert backend.stats().restarts == restarts
        plan.write_text("nan 1")
        broken = await answers(backend, "nan")
        assert any(isinstance(given, EngineError) and "not finite" in str(given) for given in broken)
        assert await answers(backend, "after nan") == want
        clean = "what a request's own numbers do costs nobody else the engine"
        assert backend.stats().restarts == restarts, clean
    finally:
        await backend.close()
