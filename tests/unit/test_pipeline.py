"""Properties that a build guarantees for its output."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from nearfar.build import pipeline
from nearfar.build.meanwhile import Stages
from nearfar.build.pipeline import BuildOptions, Timings, build
from nearfar.build.program.compiled import Compiled
from nearfar.build.source import Source, open_source
from nearfar.build.targets import target_of
from nearfar.build.targets.mlx import MlxTarget, MlxWriter
from nearfar.build.targets.planned import PlannedTarget
from nearfar.build.targets.target import Made, Programs, Tell
from nearfar.errors import BuildError
from nearfar.format.manifest import Kernel, Program, Requires, Rope, Weights
from nearfar.kernels.contract import Variant
from nearfar.kernels.emission import EmitContext
from nearfar.kernels.quantized import Matrix

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sample-model"


class Careless(MlxTarget):
    """A target that forgets to write the frequencies of the rotations."""

    def finish(
        self, source: Source, root: Path, weights: Weights, programs: Programs, options: BuildOptions
    ) -> Made:
        made = super().finish(source, root, weights, programs, options)
        return dataclasses.replace(made, ropes={"rope": Rope((), 1.0)})


class Together(MlxTarget):
    """A target whose compilation waits until weights are written, and whose weights wait until it
    compiles.
    """

    def __init__(self) -> None:
        self.compiles, self.writes = threading.Event(), threading.Event()

    def writer(self, source: Source, root: Path, options: BuildOptions) -> MlxWriter:
        assert self.compiles.wait(30), "nothing is compiled while weights are written"
        self.writes.set()
        return super().writer(source, root, options)

    def compile(self, source: Source, options: BuildOptions, tell: Tell) -> Programs:
        self.compiles.set()
        assert self.writes.wait(30), "no weights are written while kernels are compiled"
        return super().compile(source, options, tell)


class Failing(Together):
    """A target that cannot compile, and records whether weights have been written."""

    def __init__(self) -> None:
        super().__init__()
        self.some = threading.Event()

    def compile(self, source: Source, options: BuildOptions, tell: Tell) -> Programs:
        super().compile(source, options, tell)
        assert self.some.wait(30)
        raise BuildError("no kernel for that")


def test_weights_are_written_while_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "target_of", {"mlx": Together()}.__getitem__)
    timings = Timings()
    (made,) = build(BuildOptions(str(SAMPLE), tmp_path, targets=("mlx",)), timings=timings)
    assert (made / "manifest.json").is_file()
    assert [name for name, _ in timings.listed()] == ["open", "calibrate", "weights", "kernels", "check"]


def test_where_kernels_fail_the_weights_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing()
    monkeypatch.setattr(pipeline, "target_of", {"mlx": failing}.__getitem__)
    told: list[tuple[int, int]] = []
    stops: list[threading.Event] = []
    write = pipeline._write_weights

    def watched(*args: Any) -> Any:
        stops.append(args[-1])
        return write(*args)

    monkeypatch.setattr(pipeline, "_write_weights", watched)

    def progress(stage: str, done: int, total: int) -> None:
        if "weights" in stage:
            told.append((done, total))
            failing.some.set()
            assert stops[0].wait(30), "the other thread has failed, and nobody stops this one"

    with pytest.raises(BuildError, match="no kernel for that"):
        build(BuildOptions(str(SAMPLE), tmp_path, targets=("mlx",)), progress)
    assert told
    assert all(done < total for done, total in told)
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nearfar-weights")]


@pytest.mark.parametrize(("target", "check"), [("cpu", "cpu.paged.check"), ("webgpu", "gpu.check_rope")])
def test_a_job_without_a_kernel_is_refused_before_weights_are_read(
    target: str, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: Any) -> None:
        raise BuildError(f"no kernel for {job.kind} of {job.heads} heads")

    def late(*args: Any) -> Any:
        raise AssertionError("the build has begun")

    monkeypatch.setattr(f"nearfar.targets.{check}", refuse)
    monkeypatch.setattr(pipeline, "calibration_text", late)
    monkeypatch.setattr(pipeline, "_write_weights", late)
    with pytest.raises(BuildError, match="no kernel for rope_append of 4 heads"):
        build(BuildOptions(str(SAMPLE), tmp_path, targets=(target,)))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_weights_is_the_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(MlxTarget):
        def writer(self, source: Source, root: Path, options: BuildOptions) -> MlxWriter:
            raise TimeoutError("the disk does not answer")

    monkeypatch.setattr(pipeline, "target_of", {"mlx": Lost()}.__getitem__)
    with pytest.raises(TimeoutError, match="the disk does not answer"):
        build(BuildOptions(str(SAMPLE), tmp_path, targets=("mlx",)))


def test_the_stage_that_is_left_is_told_again_when_weights_are_written() -> None:
    told: list[tuple[str, int, int]] = []
    stages = Stages(lambda *stage: told.append(stage))
    stages.report("compiling", 0, 2)
    stages.beside("packing", 1, 2)
    stages.beside("packing", 2, 2)
    assert told == [("compiling", 0, 2), ("packing", 1, 2), ("packing", 2, 2), ("compiling", 0, 2)]


def test_what_its_own_reader_refuses_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "target_of", {"mlx": Careless()}.__getitem__)
    with pytest.raises(
        BuildError,
        match=r"its own reader rejects, please report it: .*inv_freq should be as many numbers as one of",
    ):
        build(BuildOptions(str(SAMPLE), tmp_path / "out", targets=("mlx",)))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_matrix_that_no_offset_reaches_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    options = BuildOptions(str(SAMPLE), tmp_path / "out")
    source = open_source(options)
    # the largest matrix of Gemma 4 E2B
    dense, packed = Matrix(262_144, 8960, 16), Matrix(262_144, 8960, 4, 64)
    with pytest.raises(BuildError, match=r"per_layer \[262144, 8960\] .*--quant q4"):
        target_of("cpu").check(dataclasses.replace(source, matrices={"per_layer": dense}), options)
    together = {**source.matrices, "per_layer": packed}
    target_of("cpu").check(dataclasses.replace(source, matrices=together), options)


def test_it_is_told_how_many_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that no process has begun counts with the others' number of kernels."""
    made = iter((73, 71))

    def compiled(
        _target: PlannedTarget, _job: Any, variant: Variant, context: EmitContext, *_: Any
    ) -> Compiled:
        count = next(made)
        context.told(30, count)
        kernels = {str(index): Kernel() for index in range(count)}
        return Compiled(Program(variant.name, "float32", "float16", Requires(()), (), kernels, {}), {})

    monkeypatch.setattr(PlannedTarget, "compiled", compiled)
    options = BuildOptions(str(SAMPLE), tmp_path, cpu=("x86_64-linux",), kernel_cache=False)
    told: list[tuple[int, int]] = []
    target_of("cpu").compile(open_source(options), options, lambda *count: told.append(count))
    assert told == [(0, 0), (30, 146), (73, 146), (103, 144), (144, 144)]
