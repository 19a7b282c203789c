"""Attention kernels for each class of GPUs against NumPy, on both GPU targets.

Each case runs once in each run of the tests; targets, classes and precisions run in turns. One kernel serves
all steps with its number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nearfar.kernels.contract import Precision
from nearfar.kernels.jobs import Attend, Linear
from nearfar.kernels.quantized import Matrix
from tests.support import gpu_checks, gpu_jobs
from tests.support.turns import in_turns

from .gpu_harness import DTYPES, PRECISIONS, TARGETS, about, kernels, runner

DEVICES = pytest.mark.parametrize("device", ["mobile", "discrete"])
"""The classes whose kernels differ: integrated GPUs have the kernels of discrete ones, or smaller tiles."""
Shape = tuple[int, int, int, int]


def check_runs(made: Attend, target: str, device: str, precision: Precision, *runs: str) -> None:
    """Check steps whose rows are these runs (names of RUNS) with one kernel."""
    for name in runs:
        with about(name):
            gpu_checks.check_runs(
                kernels(target, precision, device), runner(target), precision, made, gpu_jobs.RUNS[name]
            )


def job(shape: tuple[int, int, int, int], precision: Precision = "f32", **flags: Any) -> Attend:
    made = gpu_jobs.paged(Attend, shape, DTYPES[precision], **flags)
    assert isinstance(made, Attend)
    return made


@in_turns("target", "device", "precision")
@TARGETS
@pytest.mark.parametrize("device", ["software", "mobile", "discrete"])
@PRECISIONS
@pytest.mark.parametrize("shape", gpu_jobs.SHAPES, ids=str)
def test_head_sizes(shape: Shape, precision: Precision, device: str, target: str) -> None:
    """The rows of a step go backwards in their sequences."""
    made = kernels(target, precision, device)
    gpu_checks.check(made, runner(target), precision, job(shape, precision))


@DEVICES
@pytest.mark.parametrize("m", [1, 64])
def test_nothing_rests_on_a_way_to_float16_and_back(m: int, device: str) -> None:
    """A compiler may drop a conversion to float16 and back: NVIDIA's does, and then weights of parts had 11
    bits.
    """
    from . import webgpu_harness

    staged = kernels("webgpu", "f16", device).stages(job((m, 4, 1, 64), "f16"))
    made = webgpu_harness.compile_staged(staged, "f16")
    assert any("f16(" in shader.source for shader in made)
    assert not any("f32(f16(" in shader.source for shader in made)


@in_turns("shape", "runs", "target", "device", "precision")
@pytest.mark.parametrize(("shape", "runs"), [((4, 9, 3, 64), "decode"), ((64, 4, 1, 80), "mixed")], ids=str)
@TARGETS
@DEVICES
@PRECISIONS
@pytest.mark.parametrize("flags", gpu_jobs.ATTENDS)
def test_flags(flags: str, shape: Shape, runs: str, precision: Precision, device: str, target: str) -> None:
    """Each flag is in two of ATTENDS: a run takes one of them with few rows and one with many."""
    check_runs(job(shape, precision, **gpu_jobs.ATTENDS[flags]), target, device, precision, runs)


@in_turns("target", "device", "precision")
@TARGETS
@DEVICES
@PRECISIONS
@pytest.mark.parametrize(("m", "window"), [(4, None), (16, 37), (64, None), (64, 65), (64, 200)])
def test_steps(m: int, window: int | None, precision: Precision, device: str, target: str) -> None:
    """Any rows of a step, also more or fewer rows than a tile has."""
    made = job((m, 8, 4, 32), precision, window=window)
    check_runs(made, target, device, precision, *gpu_jobs.RUNS)


@in_turns("target", "device", "precision")
@TARGETS
@DEVICES
@PRECISIONS
@pytest.mark.parametrize("dim", [8, 18, 24, 256, 512])
def test_head_sizes_of_many_rows(dim: int, precision: Precision, device: str, target: str) -> None:
    made = job((64, 2, 1, dim), precision, sinks=True)
    check_runs(made, target, device, precision, "mixed" if dim < 256 else "one_goes_on")


@in_turns("target", "device", "m")
@TARGETS
@DEVICES
@pytest.mark.parametrize("m", [1, 64])
def test_a_float16_cache_beside_float32(m: int, device: str, target: str) -> None:
    mixed = replace(job((m, 8, 2, 64)), kv_dtype="float16")
    check_runs(mixed, target, device, "f16", "mixed")


@in_turns("target", "device")
@TARGETS
@DEVICES
@pytest.mark.parametrize("m", [1, 16, 64])
def test_32768_positions(m: int, device: str, target: str) -> None:
    """There are more blocks than parts, so a workgroup takes several blocks."""
    made = gpu_jobs.long_attention(m, "float32", **gpu_jobs.ATTENDS["all" if m == 1 else "plain"])
    gpu_checks.check_runs(kernels(target, "f32", device), runner(target), "f32", made, gpu_jobs.LONG_RUN)


@in_turns("target", "device")
@TARGETS
@DEVICES
def test_a_matmul_puts_32768_positions_together(device: str, target: str) -> None:
    attend = gpu_jobs.long_attention(1, "float32", sinks=True)
    linear = Linear(1, Matrix(40, 32, 4, 32), "float32", "float32")
    made = kernels(target, "f32", device)
    gpu_checks.check_split(made, runner(target), "f32", attend, linear, gpu_jobs.LONG_RUN)


@in_turns("shape", "runs", "target", "device", "precision")
@pytest.mark.parametrize(
    ("shape", "runs"),
    [((1, 9, 3, 64), ("one_goes_on", "padding")), ((4, 6, 2, 32), ("decode", "borders"))],
    ids=str,
)
@TARGETS
@DEVICES
@PRECISIONS
@pytest.mark.parametrize("flags", gpu_jobs.ATTENDS)
def test_a_matmul_puts_attention_together(
    flags: str, shape: Shape, runs: tuple[str, ...], precision: Precision, device: str, target: str
) -> None:
    """A matmul over attention in parts equals a matmul over whole attention: also for rows of padding, rows
    with one part, and more positions than all parts have blocks.
    """
    attend = job(shape, precision, **gpu_jobs.ATTENDS[flags])
    matrix = Matrix(72, shape[1] * shape[3], 4, 64)
    linear = Linear(shape[0], matrix, DTYPES[precision], "float32", bias=flags == "all", residual=True)
    made = kernels(target, precision, device)
    for name in runs:
        with about(name):
            gpu_checks.check_split(made, runner(target), precision, attend, linear, gpu_jobs.RUNS[name])
