"""Pipelines on Vulkan and WebGPU: which thread compiles which kernel when, and how steps without memory
continue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime import Engine, Progress, SamplingParams
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.executors.compiling import content
from nearfar.edge_runtime.executors.vulkan import executor as vulkan
from nearfar.edge_runtime.executors.vulkan import pipelines
from nearfar.edge_runtime.executors.vulkan.binding import fail
from nearfar.edge_runtime.executors.webgpu import executor as webgpu
from nearfar.edge_runtime.executors.webgpu.device import require_wgpu
from nearfar.folders import read_cache
from nearfar.format.manifest import Kernel, Program
from tests.shared_data import shared_data
from tests.support.artifacts import Built
from tests.support.backends import require, with_some_steps

PATIENCE = 60
"""Seconds after which a test that waits for kernels fails."""

FEW = 4
"""Rows of the second smallest of three steps. Steps of these sizes are among those of the tests over the
backends (tests/support/backends.py), so Mesa keeps the kernels that one file has compiled for the other.
"""

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@dataclass
class Rig:
    """An artifact on one kind of GPU, and a record of the kernels that were compiled, by thread."""

    device: str
    path: Path
    compiled: list[tuple[str, str]]

    def load(self, **options: Any) -> Engine:
        return Engine.load(self.path, device=self.device, precision="f32", kv_memory="1MB", **options)

    @property
    def program(self) -> Program:
        return next(p for p in Artifact.open(self.path).manifest.programs if p.precision == "f32")

    def kernels(self, *runs: tuple[str, int]) -> set[str]:
        """The kernels in the plans of these runs."""
        artifact = Artifact.open(self.path)
        buckets = (b for name, size in runs for b in self.program.functions[name] if b.size == size)
        return {launch.kernel for bucket in buckets for launch in artifact.plan(bucket).launches}


@pytest.fixture(scope="module", params=["vulkan", "webgpu"])
def path(request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(request.param)
    whole = built("stories260K", "none") / request.param
    return with_some_steps(whole, tmp_path_factory.mktemp("stories") / request.param, (FEW,))


@pytest.fixture
def rig(path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    compiled: list[tuple[str, str]] = []
    owner: Any = pipelines.Pipelines if path.name == "vulkan" else webgpu.WebGpuExecutor
    original = owner._compile

    def compile_one(self: Any, name: str, kernel: Kernel) -> Any:
        compiled.append((name, threading.current_thread().name))
        return original(self, name, kernel)

    monkeypatch.setattr(owner, "_compile", compile_one)
    return Rig(path.name, path, compiled)


def played(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Make the executors take any device for a processor (`cpu`) or for a card (`discrete`)."""
    select = vulkan.select
    monkeypatch.setattr(vulkan, "select", lambda *given: replace(select(*given), kind=kind))
    monkeypatch.setattr(webgpu, "is_hardware", lambda: kind != "cpu")


def test_an_answer_waits_for_its_own_kernels_and_each_is_compiled_once_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(monkeypatch, "cpu")
    told: list[tuple[int, int]] = []
    with rig.load() as engine:
        engine.asynchronous.core.compiling.tell = lambda done, total: told.append((done, total))
        assert rig.compiled == [], "a software GPU compiles nothing before the first request"
        first = [event.token for event in engine.generate([1, 5, 7], SHORT)]
        needed = rig.kernels(("step", 1), ("step", FEW), ("greedy", 1))
        assert {name for name, _ in rig.compiled} <= needed
        assert {thread for _, thread in rig.compiled} == {"nearfar-compile"}
        assert told[0][0] < told[0][1] <= len(needed)
        assert told[-1][0] == told[-1][1]
        told.clear()
        assert [event.token for event in engine.generate([1, 5, 7], SHORT)] == first
        assert told == []
        assert len(rig.compiled) == len({content(rig.program.kernels[name]) for name, _ in rig.compiled})


def test_a_gpu_compiles_the_other_kernels_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, "discrete")
    runs = [(name, bucket.size) for name, buckets in rig.program.functions.items() for bucket in buckets]
    every = {content(rig.program.kernels[name]) for name in rig.kernels(*runs)}
    with rig.load() as engine:
        last = list(engine.generate([1, 5, 7], SHORT))
        assert len(last) == 4
        there = threading.Event()
        waiting = threading.Thread(target=_until, args=(lambda: len(rig.compiled) == len(every), there))
        waiting.start()
        assert there.wait(PATIENCE), f"{len(rig.compiled)} of {len(every)} kernels"
    waiting.join()
    assert {content(rig.program.kernels[name]) for name, _ in rig.compiled} == every


def test_closing_while_kernels_are_compiled_behind_leaves_no_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(monkeypatch, "discrete")
    for _ in range(3):
        rig.load().close()
        assert "nearfar-compile" not in {thread.name for thread in threading.enumerate()}


def test_steps_without_memory_become_smaller_and_the_text_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's own error is raised at the first use of a bucket, when drivers allocate memory."""
    tokens = [1, *(5 + number % 200 for number in range(100))]
    with rig.load() as engine:
        expected = [event.token for event in engine.generate(tokens, SHORT)]
    if rig.device == "vulkan":
        record = vulkan.VulkanExecutor._record

        def refused(self: vulkan.VulkanExecutor, function: str, size: int) -> Any:
            if function == "step" and size > FEW:
                fail(self.gpu.name, "preparing kernels", "VkErrorOutOfDeviceMemory")
            return record(self, function, size)

        monkeypatch.setattr(vulkan.VulkanExecutor, "_record", refused)
    else:
        prepare = webgpu.WebGpuExecutor._prepare

        def refused_too(self: webgpu.WebGpuExecutor, function: str, size: int) -> Any:
            if function == "step" and size > FEW:
                raise require_wgpu().GPUOutOfMemoryError("not enough memory left")
            return prepare(self, function, size)

        monkeypatch.setattr(webgpu.WebGpuExecutor, "_prepare", refused_too)
    with rig.load() as engine, caplog.at_level(logging.WARNING):
        assert [event.token for event in engine.generate(tokens, SHORT)] == expected
        assert engine.asynchronous.core.largest_step == FEW
        assert f"steps of at most {FEW} rows" in caplog.messages[-1]
        caplog.clear()
        assert [event.token for event in engine.generate(tokens[:80], SHORT)]
        assert not caplog.messages


def test_an_engine_that_is_ready_compiles_nothing_for_an_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that make an engine ready do not change an answer.

    On webgpu, which has no pipeline cache and takes longer, only decode is made ready.
    """
    played(monkeypatch, "cpu")
    told: list[Progress] = []
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    everything = rig.device == "vulkan"
    with rig.load(ready="all" if everything else "decode", progress=told.append) as engine:
        assert told[-1].phase == "ready"
        assert "warming" in {event.phase for event in told}
        compiled = list(rig.compiled)
        told.clear()
        assert engine.completions.create("", max_tokens=199, temperature=0).choices[0].text == golden
        if everything:
            assert len(list(engine.generate([1, *(5 + number % 200 for number in range(100))], SHORT))) == 4
        assert rig.compiled == compiled
        assert {event.phase for event in told} == {"prompt"}


def test_pipelines_are_kept_as_soon_as_they_are_compiled(
    built: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server may be killed before it closes its engine."""
    require("vulkan")
    played(monkeypatch, "cpu")
    file = tmp_path / "cache.bin"
    monkeypatch.setattr(pipelines, "cache_file", lambda _identity, _kernels: file)
    path = built("stories260K", "none") / "vulkan"
    with Engine.load(path, device="vulkan", precision="f32", kv_memory="1MB") as engine:
        assert read_cache(file) == b""
        assert list(engine.generate([1, 5, 7], SHORT))
        deadline = time.monotonic() + PATIENCE
        while not read_cache(file):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_text_is_the_same_while_others_are_compiled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, "discrete")
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    with rig.load() as engine:
        assert engine.completions.create("", max_tokens=199, temperature=0).choices[0].text == golden


def _until(condition: Callable[[], bool], there: threading.Event) -> None:
    while not condition():
        if there.wait(0.01):
            return
    there.set()
