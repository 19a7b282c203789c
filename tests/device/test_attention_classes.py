"""Attention as shaped for each class of GPU, against NumPy, on both GPU targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nearfar.format.manifest import Float
from nearfar.targets.gpu import GpuKernels
from nearfar.targets.gpu.classes import CLASSES, Tuning
from nearfar.targets.jobs import Attend, Linear
from nearfar.targets.kernels import Precision
from nearfar.targets.quantized import Matrix
from tests.support import gpu_jobs, vulkan_run

from . import webgpu_harness

RUNNERS: dict[str, gpu_jobs.Run] = {"webgpu": webgpu_harness.run, "vulkan": vulkan_run.run}
Make = Callable[[Precision], GpuKernels]
DTYPES: dict[Precision, Float] = {"f32": "float32", "f16": "float16"}


@pytest.fixture(params=["mobile", "discrete"])
def device_class(request: pytest.FixtureRequest) -> str:
    """Those that differ: integrated GPUs have the discrete ones' kernels or smaller tiles."""
    return str(request.param)


@pytest.fixture
def kernels(device_class: str) -> Make:
    return lambda precision: GpuKernels(Tuning(CLASSES[device_class], half=precision == "f16"))


def job(shape: tuple[int, int, int, int], precision: Precision = "f32", **flags: Any) -> Attend:
    made = gpu_jobs.paged(Attend, shape, DTYPES[precision], **flags)
    assert isinstance(made, Attend)
    return made


@pytest.mark.parametrize("shape", gpu_jobs.SHAPES, ids=str)
def test_head_sizes(shape: tuple[int, int, int, int], kernels: Make) -> None:
    """Every head size on one of the targets, by turns; rows of a step go back in their sequences."""
    target = ("webgpu", "vulkan")[gpu_jobs.SHAPES.index(shape) % 2]
    precision: Precision = "f16" if shape[-1] % 32 else "f32"
    gpu_jobs.check(kernels(precision), RUNNERS[target], precision, job(shape, precision))


@pytest.mark.parametrize("m", [1, 64])
def test_nothing_rests_on_a_way_to_float16_and_back(m: int, kernels: Make) -> None:
    """A compiler may take it for nothing: NVIDIA's does, and the weights of parts were 11 bits."""
    made = webgpu_harness.compile_staged(kernels("f16").stages(job((m, 4, 1, 64), "f16")), "f16")
    assert any("f16(" in shader.source for shader in made)
    assert not any("f32(f16(" in shader.source for shader in made)


@pytest.mark.parametrize("flags", gpu_jobs.ATTENDS)
def test_flags(flags: str, kernels: Make) -> None:
    few = job((4, 9, 3, 64), "f16", **gpu_jobs.ATTENDS[flags])
    gpu_jobs.check_runs(kernels("f16"), RUNNERS["webgpu"], "f16", few, gpu_jobs.RUNS["decode"])
    many = job((64, 4, 1, 80), "f32", **gpu_jobs.ATTENDS[flags])
    gpu_jobs.check_runs(kernels("f32"), RUNNERS["vulkan"], "f32", many, gpu_jobs.RUNS["mixed"])


@pytest.mark.parametrize("runs", gpu_jobs.RUNS)
def test_steps(runs: str, kernels: Make) -> None:
    """Whatever rows a step has: also more rows or fewer than are a tile."""
    for m, window in ((4, None), (16, 37), (64, None), (64, 65), (64, 200)):
        made = job((m, 8, 4, 32), window=window)
        gpu_jobs.check_runs(kernels("f32"), RUNNERS["vulkan"], "f32", made, gpu_jobs.RUNS[runs])


@pytest.mark.parametrize("dim", [8, 18, 24, 256, 512])
def test_head_sizes_of_many_rows(dim: int, kernels: Make) -> None:
    made, runs = job((64, 2, 1, dim), "f32", sinks=True), "mixed" if dim < 256 else "one_goes_on"
    gpu_jobs.check_runs(kernels("f32"), RUNNERS["vulkan"], "f32", made, gpu_jobs.RUNS[runs])


@pytest.mark.parametrize("target", RUNNERS)
def test_a_float16_cache_beside_float32(target: str, kernels: Make) -> None:
    for m in (1, 64):
        mixed = replace(job((m, 8, 2, 64)), kv_dtype="float16")
        gpu_jobs.check_runs(kernels("f16"), RUNNERS[target], "f16", mixed, gpu_jobs.RUNS["mixed"])


@pytest.mark.parametrize("m", [1, 16, 64])
def test_32768_positions(m: int, kernels: Make) -> None:
    """More blocks than parts: a workgroup takes several."""
    made = gpu_jobs.long_attention(m, "float32", **gpu_jobs.ATTENDS["all" if m == 1 else "plain"])
    gpu_jobs.check_runs(kernels("f32"), RUNNERS["vulkan"], "f32", made, gpu_jobs.LONG_RUN)


def test_a_matmul_puts_32768_positions_together(kernels: Make) -> None:
    attend = gpu_jobs.long_attention(1, "float32", sinks=True)
    linear = Linear(1, Matrix(40, 32, 4, 32), "float32", "float32")
    gpu_jobs.check_split(kernels("f32"), RUNNERS["vulkan"], "f32", attend, linear, gpu_jobs.LONG_RUN)


@pytest.mark.parametrize("target", RUNNERS)
@pytest.mark.parametrize("flags", gpu_jobs.ATTENDS)
def test_a_matmul_puts_attention_together(target: str, flags: str, kernels: Make) -> None:
    """What attention leaves in parts is what a matmul of attention gives: also of rows of padding, of rows
    with one part, and with more positions than are blocks in all parts.
    """
    precision: Precision = "f16" if flags in ("plain", "all") else "f32"
    dtype = DTYPES[precision]
    for shape in ((1, 9, 3, 64), (4, 6, 2, 32)):
        attend = job(shape, precision, **gpu_jobs.ATTENDS[flags])
        matrix = Matrix(72, shape[1] * shape[3], 4, 64)
        linear = Linear(shape[0], matrix, dtype, "float32", bias=flags == "all", residual=True)
        for runs in ("decode", "borders") if shape[0] == 4 else ("one_goes_on", "padding"):
            gpu_jobs.check_split(
                kernels(precision), RUNNERS[target], precision, attend, linear, gpu_jobs.RUNS[runs]
            )
