"""Attention as shaped for each class of GPU, against NumPy, on both GPU targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nearfar.format.manifest import Float
from nearfar.targets.gpu import GpuKernels
from nearfar.targets.gpu.classes import CLASSES, Tuning
from nearfar.targets.jobs import Attend
from nearfar.targets.kernels import Precision
from tests.support import gpu_jobs, vulkan_run

from . import webgpu_harness

RUNNERS: dict[str, gpu_jobs.Run] = {"webgpu": webgpu_harness.run, "vulkan": vulkan_run.run}
Check = Callable[..., None]
DTYPES: dict[Precision, Float] = {"f32": "float32", "f16": "float16"}


@pytest.fixture(params=["mobile", "integrated", "discrete"])
def device_class(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kernels(device_class: str) -> Callable[[Precision], GpuKernels]:
    return lambda precision: GpuKernels(Tuning(CLASSES[device_class], half=precision == "f16"))


def job(shape: tuple[int, int, int, int], precision: Precision = "f32", **flags: Any) -> Attend:
    made = gpu_jobs.paged(Attend, shape, DTYPES[precision], **flags)
    assert isinstance(made, Attend)
    return made


@pytest.mark.parametrize("shape", gpu_jobs.SHAPES, ids=str)
def test_head_sizes(shape: tuple[int, int, int, int], kernels: Check) -> None:
    """Every head size on one of the targets, by turns; rows of a step go back in their sequences."""
    target = ("webgpu", "vulkan")[gpu_jobs.SHAPES.index(shape) % 2]
    precision: Precision = "f16" if shape[-1] % 32 else "f32"
    gpu_jobs.check(kernels(precision), RUNNERS[target], precision, job(shape, precision))


@pytest.mark.parametrize("target", RUNNERS)
@pytest.mark.parametrize("flags", gpu_jobs.ATTENDS)
def test_flags(flags: str, target: str, kernels: Check) -> None:
    small = job((4, 9, 3, 64), "f16", **gpu_jobs.ATTENDS[flags])
    gpu_jobs.check_runs(kernels("f16"), RUNNERS[target], "f16", small, "decode")
    large = job((64, 4, 1, 80), "f32", **gpu_jobs.ATTENDS[flags])
    gpu_jobs.check_runs(kernels("f32"), RUNNERS[target], "f32", large, "mixed")


@pytest.mark.parametrize("runs", gpu_jobs.RUNS)
def test_steps(runs: str, kernels: Check) -> None:
    """Whatever rows a step has: also in more rows or fewer than are a tile."""
    for m, window in ((4, None), (16, 37), (64, None), (64, 65)):
        gpu_jobs.check_runs(kernels("f32"), vulkan_run.run, "f32", job((m, 8, 4, 32), window=window), runs)


@pytest.mark.parametrize("target", RUNNERS)
def test_a_float16_cache_beside_float32(target: str, kernels: Check) -> None:
    for m in (1, 64):
        mixed = replace(job((m, 8, 2, 64)), kv_dtype="float16")
        gpu_jobs.check_runs(kernels("f16"), RUNNERS[target], "f16", mixed, "mixed")


@pytest.mark.parametrize("m", [1, 4, 16, 64])
def test_32768_positions(m: int, kernels: Check) -> None:
    """More blocks than parts: a workgroup takes several."""
    for flags in ("plain", "all"):
        made = gpu_jobs.long_attention(m, "float32", **gpu_jobs.ATTENDS[flags])
        gpu_jobs.check(kernels("f32"), vulkan_run.run, "f32", made)
