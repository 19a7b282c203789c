"""Kernels over a KV cache of 8 or 4 bits, for classes of GPUs, on the GPU targets in turns, against NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nearfar.edge_runtime.executors.quantized_pages import parts_of
from nearfar.format.kv import rows_of
from nearfar.kernels.contract import Precision
from nearfar.kernels.jobs import Attend, Project, RopeAppend
from nearfar.targets.gpu import GpuKernels
from nearfar.targets.gpu.classes import CLASSES, Tuning
from tests.support import gpu_checks, gpu_inputs, gpu_jobs, project_jobs, quantized_kv
from tests.support.turns import in_turns

from .gpu_harness import runner

pytestmark = in_turns("run")
OF_EITHER = in_turns("kv_dtype")
"""int8 and int4 run in turns: their kernels differ only in how a word is unpacked."""


@pytest.fixture(params=["webgpu", "vulkan"])
def run(request: pytest.FixtureRequest) -> gpu_checks.Run:
    return runner(request.param)


@pytest.fixture(params=["int8", "int4"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kernels(device: str, precision: Precision = "f32") -> GpuKernels:
    return GpuKernels(Tuning(CLASSES[device], half=precision == "f16"))


@OF_EITHER
@pytest.mark.parametrize(
    ("device", "shape", "runs", "flags", "precision"),
    [
        ("discrete", (1, 8, 2, 64), "one_goes_on", "plain", "f32"),
        ("mobile", (4, 6, 3, 96), "borders", "all", "f16"),
        ("discrete", (64, 8, 2, 128), "mixed", "sinks", "f32"),
        ("software", (1, 4, 2, 64), "one_goes_on", "window", "f32"),
        ("software", (16, 4, 4, 32), "mixed", "all", "f32"),
    ],
)
def test_attention(
    device: str, shape: tuple[int, int, int, int], runs: str, flags: str, precision: Precision, kv_dtype: str,
    run: gpu_checks.Run,
) -> None:  # fmt: skip
    dtype = "float16" if precision == "f16" else "float32"
    made = gpu_jobs.paged(Attend, shape, dtype, **gpu_jobs.ATTENDS[flags])
    job = replace(made, kv_dtype=kv_dtype)
    gpu_checks.check_runs(kernels(device, precision), run, precision, job, gpu_jobs.RUNS[runs])


@OF_EITHER
@pytest.mark.parametrize(
    ("shape", "flags", "precision"),
    [
        ((1, 4, 2, 64), "q_scale", "f32"),
        ((16, 9, 3, 96), "norm_all_after", "f16"),
        ((33, 4, 1, 32), "norope", "f32"),
    ],
)
def test_append(
    shape: tuple[int, int, int, int], flags: str, precision: Precision, kv_dtype: str, run: gpu_checks.Run
) -> None:
    """Covers rows that do not fill the last workgroup, and a row of padding."""
    dtype = "float16" if precision == "f16" else "float32"
    made = gpu_jobs.paged(RopeAppend, shape, dtype, **gpu_jobs.ROPES[flags])
    gpu_checks.check(kernels("discrete", precision), run, precision, replace(made, kv_dtype=kv_dtype))


@OF_EITHER
@pytest.mark.parametrize(
    ("shape", "flags"),
    [((4, 6, 2, 64), {}), ((2, 6, 2, 96), {"norm_eps": 1e-6, "v_norm_eps": 1e-6}), ((1, 2, 1, 256), {})],
)
def test_projections_that_append(
    shape: tuple[int, int, int, int], flags: dict[str, Any], kv_dtype: str, run: gpu_checks.Run
) -> None:
    made = project_jobs.job(shape, linear={"norm": 1e-5}, **flags)
    job = replace(made, paged=replace(made.paged, kv_dtype=kv_dtype))
    assert isinstance(job, Project)
    arrays = project_jobs.arrays(kernels("discrete"), job)
    gpu_checks.check(kernels("discrete"), run, "f32", job, arrays=arrays)


def test_what_float16_hardly_holds(kv_dtype: str, run: gpu_checks.Run) -> None:
    """Scale and offset equal NumPy's to the bit: for values below float16's normal numbers, for equal values,
    for huge values, which saturate, and for NaN, which makes only its own group NaN.
    """
    dim, kv, m = 128, 2, 16
    made: RopeAppend = gpu_jobs.paged(RopeAppend, (m, 2, kv, dim), "float32", rope=False)
    job = replace(made, kv_dtype=kv_dtype)
    rng = np.random.default_rng(4)
    arrays = gpu_inputs.inputs(kernels("discrete"), job, rng)
    rows = rng.standard_normal((m, 2 + 2 * kv, dim)).astype(np.float32)
    rows[0] *= np.float32(1e-6)
    rows[1] *= np.float32(3e-4)
    rows[2] = np.float32(0.1)
    rows[3] *= np.float32(1e5)
    rows[4, :, 5] = np.nan
    rows[5, :, 70] = np.inf
    rows[6] = 0
    pages = job.slots * job.pages_per_slot
    dtype, shape = rows_of((pages, kv, job.page_size, dim), kv_dtype)
    table = np.arange(pages, dtype=np.int32).reshape(job.slots, job.pages_per_slot)
    arrays |= {"x": rows.reshape(m, -1), "page_table": table, "out": np.zeros(job.out[0], np.float32)}
    arrays["slots"][:m], arrays["positions"][:m] = 1, np.arange(m)
    arrays |= {name: np.zeros(shape, dtype) for name in ("k_cache", "v_cache")}
    if job.rounds_keys:
        arrays["k_rounding"][...] = 0
    got = run(kernels("discrete").stages(job), "f32", arrays)
    for name, first in (("k_cache", 2), ("v_cache", 2 + kv)):
        page = got[name][job.pages_per_slot][None]
        told = {part: array[0] for part, array in parts_of(page, dim, kv_dtype, innermost=False).items()}
        wanted = quantized_kv.parts(rows[:, first : first + kv].swapaxes(0, 1), kv_dtype)
        none = np.isnan(wanted["biases"])
        assert none.any()
        assert not none.all()
        assert (np.isnan(told["biases"]) == none).all()
        for part in ("scales", "biases"):
            np.testing.assert_array_equal(told[part][~none], wanted[part][~none])
        np.testing.assert_allclose(
            quantized_kv.rows(told, kv_dtype)[:, 7:], quantized_kv.rows(wanted, kv_dtype)[:, 7:], rtol=1e-6
        )


def test_small_values_are_not_taken_for_zeros(kv_dtype: str, run: gpu_checks.Run) -> None:
    """Scale and offset are below float16's normal numbers."""
    job = replace(gpu_jobs.paged(Attend, (1, 2, 1, 64), "float32"), kv_dtype=kv_dtype)
    arrays = gpu_inputs.step_inputs(job, gpu_jobs.RUNS["one_goes_on"], np.random.default_rng(1))
    small = np.random.default_rng(2).random(arrays["v_cache"].shape).astype(np.float32) * np.float32(4e-5)
    arrays["v_cache"] = quantized_kv.rounded(small - np.float32(2e-5), kv_dtype)
    for device in ("discrete", "software"):
        gpu_checks.check(kernels(device), run, "f32", job, arrays=dict(arrays))
