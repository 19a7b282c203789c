"""Several engines over one CPU artifact, in one process and across a fork, as an application has them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import psutil
import pytest

from nearfar.edge_runtime import Engine
from nearfar.errors import DeviceError
from tests.support.backends import Lab, executor
from tests.support.processes import eventually, forked, pool_threads


def load(artifact: Path, threads: int) -> Engine:
    return Engine.load(artifact, threads=threads, kv_memory="32MB")


def answer(engine: Engine) -> str:
    return engine.completions.create("Once upon a time", max_tokens=24, temperature=0).choices[0].text


@pytest.fixture
def artifact(lab: Lab) -> Path:
    return lab.artifact("stories", "cpu")


def test_closing_one_engine_leaves_the_others_threads(artifact: Path) -> None:
    """For example, a server loads the next version before it closes the last one, or a notebook
    loads again.
    """
    count = pool_threads()
    first = load(artifact, 2)
    text = answer(first)
    with load(artifact, 3) as second:
        assert (executor(first).threads, executor(second).threads) == (2, 3)
        assert eventually(count, 1 + 2)
        first.close()
        assert (executor(first).threads, executor(second).threads) == (0, 3)
        assert eventually(count, 2)
        assert answer(second) == text
    assert eventually(count, 0)


def test_a_step_of_a_few_requests_is_padded_to_no_more_than_twice_its_rows(artifact: Path) -> None:
    """On a CPU the time of a step grows with its rows: two requests at once take a step of 2 rows, six
    requests one of 8.
    """
    with load(artifact, 2) as engine:
        limits = engine.asynchronous.core.scheduler.limits
        found = [limits.bucket(rows) for rows in (1, 2, 3, 6, 8, 12, 20, 40, 200)]
    assert found == [1, 2, 4, 8, 8, 16, 32, 64, 256]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_of_a_process_with_an_engine_does_not_hang(artifact: Path) -> None:
    """multiprocessing forks by default on Linux. The child can close the engine that it inherited, and using
    it raises an error that says why it cannot.
    """
    with load(artifact, 2) as engine:
        text = answer(engine)

        def child() -> bool:
            with pytest.raises(DeviceError, match="loaded before this process was forked"):
                answer(engine)
            engine.close()
            with load(artifact, 2) as own:
                return answer(own) == text

        assert forked(child)
        assert answer(engine) == text


def test_the_scheduler_has_the_pages_that_the_executor_has(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds however much memory other processes take or free while the weights are loaded."""
    host, asked = psutil.virtual_memory(), itertools.count(1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host._replace(available=next(asked) * 8_000_000))
    with Engine.load(artifact, threads=1) as engine:
        core = engine.asynchronous.core
        (allocator,) = core.scheduler.table.allocators
        assert executor(engine)._layout.buffers["kv.0.k"].extents[0] == allocator.count
