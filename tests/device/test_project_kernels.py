"""Projections that rotate and append in the same launch, for each class of GPUs, on both GPU targets.

Each case runs once in each run of the tests; targets, classes and precisions run in turns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from nearfar.format.adapters import DeviceClass
from nearfar.kernels.contract import Precision
from nearfar.kernels.jobs import Project, RopeAppend, Rows
from nearfar.targets.gpu import GpuKernels
from nearfar.targets.gpu.classes import CLASSES, Tuning
from tests.support import gpu_checks, gpu_inputs, gpu_jobs, project_jobs
from tests.support.job_reference import rows
from tests.support.turns import in_turns

from .gpu_harness import DTYPES, PRECISIONS, TARGETS, kernels, runner

DEVICES = pytest.mark.parametrize("device", gpu_jobs.GPU_CLASSES)


def check(job: Project, target: str, device: str, precision: Precision) -> None:
    made = kernels(target, precision, device)
    assert made.projects(job)
    gpu_checks.check(made, runner(target), precision, job, arrays=project_jobs.arrays(made, job))


@in_turns("target", "device", "precision")
@TARGETS
@DEVICES
@PRECISIONS
@pytest.mark.parametrize("flags", project_jobs.FLAGS)
def test_flags(flags: str, precision: Precision, device: str, target: str) -> None:
    linear, follows = project_jobs.FLAGS[flags]
    job = project_jobs.job((4, 6, 2, 64), DTYPES[precision], linear=linear, **follows)
    check(job, target, device, precision)


@in_turns("target", "device", "precision", "flags")
@TARGETS
@DEVICES
@PRECISIONS
@pytest.mark.parametrize("flags", [{}, {"norm_eps": 1e-6, "v_norm_eps": 1e-6}], ids=["plain", "norms"])
@pytest.mark.parametrize("shape", project_jobs.HEADS, ids=str)
def test_head_sizes(
    shape: tuple[int, int, int, int], flags: dict[str, float], precision: Precision, device: str, target: str
) -> None:
    job = project_jobs.job(shape, DTYPES[precision], linear={"norm": 1e-5}, **flags)
    check(job, target, device, precision)


@in_turns("target")
@TARGETS
@pytest.mark.parametrize("matrix", project_jobs.matrices())
def test_matrices(matrix: str, target: str) -> None:
    job = project_jobs.job((2, 4, 2, 64), matrix=project_jobs.matrices()[matrix], linear={"bias": True})
    check(job, target, "discrete", "f32")


@in_turns("target", "device")
@TARGETS
@DEVICES
@pytest.mark.parametrize("flags", [{}, {"norm_eps": 1e-6, "v_norm_eps": 1e-6}], ids=["plain", "norms"])
def test_heads_that_are_stored_differently(flags: dict[str, float], device: str, target: str) -> None:
    """Each piece has a launch, which writes its heads and no other."""
    precision: Precision = "f16" if device == "discrete" else "f32"
    job = project_jobs.mixed((2, 4, 2, 64), DTYPES[precision], **flags)
    assert len(kernels(target, precision, device).stages(job).stages) == len(job.linear.matrix.pieces) == 2
    check(job, target, device, precision)


@in_turns("target")
@TARGETS
def test_a_float16_cache_beside_float32(target: str) -> None:
    """Values that float16 cannot hold saturate."""
    job = project_jobs.job((4, 6, 2, 64))
    job = replace(job, paged=replace(job.paged, kv_dtype="float16"))
    made, run = kernels(target, "f32", "discrete"), runner(target)
    arrays = project_jobs.arrays(made, job)
    arrays["x"] = np.float32(1e5) * arrays["x"]
    gpu_checks.check(made, run, "f16", job, arrays=arrays)
    got = run(made.stages(job), "f16", {k: v for k, v in arrays.items() if k != "w"})
    assert np.abs(got["k_cache"]).max() == np.abs(got["v_cache"]).max() == 65504


@in_turns("target")
@TARGETS
@pytest.mark.parametrize("flags", ["plain", "norope", "q_scale", "q", "q_norm_after"])
def test_rows(flags: str, target: str) -> None:
    made = gpu_jobs.paged(RopeAppend, (4, 6, 2, 64), "float32", **gpu_jobs.ROPES[flags])
    job = Rows.of(made)
    arrays = gpu_inputs.paged_inputs(made, np.random.default_rng(2))
    given = {name: arrays[name] for name in job.inputs()} | {"out": np.full(job.out[0], 7, np.int32)}
    staged = kernels(target, "f32", "discrete").stages(job)
    got, want = runner(target)(staged, "f32", given)["out"], rows(job, arrays)
    numbers = [0, *range(2, job.FACTS)]
    assert (got[:, numbers] == want[:, numbers]).all()
    np.testing.assert_allclose(got.view(np.float32)[:, 1], want.view(np.float32)[:, 1], rtol=1e-6)
    assert (got[:, job.FACTS :] == want[:, job.FACTS :]).all()


@pytest.mark.parametrize(
    ("change", "flags"),
    [((8, 4, 2, 64), {}), ((1, 4, 2, 12), {}), ((1, 4, 2, 64), {"norm_eps": 1e-6, "norm_all": True})],
    ids=str,
)
def test_what_has_no_kernel_says_so(change: tuple[int, int, int, int], flags: dict[str, object]) -> None:
    job = project_jobs.job(change, **flags)
    assert not any(GpuKernels(Tuning(each, half=False)).projects(job) for each in CLASSES.values())


def test_software_has_none() -> None:
    job = project_jobs.job((1, 4, 2, 64))
    can = [GpuKernels(Tuning(each, half=False)).projects(job) for each in CLASSES.values()]
    assert dict(zip(get_args(DeviceClass), can, strict=True))["software"] is False
    assert sum(can) == len(CLASSES) - 1
