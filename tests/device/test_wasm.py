"""The wasm target's modules, in Node: what the engine makes of them is what it makes of the cpu's library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nearfar.edge_runtime import Engine
from tests.shared_data import shared_data
from tests.support.backends import Lab
from tests.support.wasm_executor import open_wasm

THREADS = (1, 3)


@pytest.fixture(scope="module", params=THREADS, ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def stories(lab: Lab, threads: int) -> Iterator[Engine]:
    with open_wasm(lab.artifact("stories", "wasm"), threads) as engine:
        yield engine


def test_golden_text(stories: Engine) -> None:
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    assert stories.completions.create("", max_tokens=199, temperature=0).choices[0].text == golden
