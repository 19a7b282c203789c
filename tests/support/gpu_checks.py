"""Checks of the GPU targets' kernels: a job runs, and what it writes is compared with job_reference.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nearfar.edge_runtime.executors.quantized_pages import pages_of, parts_of
from nearfar.format.kv import BITS
from nearfar.format.manifest import Float
from nearfar.kernels.contract import Kernels, Precision, Staged
from nearfar.kernels.jobs import (
    Activation,
    Attend,
    GraphJob,
    Linear,
    Paged,
    Project,
    RopeAppend,
)
from nearfar.kernels.quantized import Matrix

from . import quantized_kv
from .gpu_inputs import inputs, step_inputs
from .job_reference import (
    ACTIVATIONS,
    PLAIN,
    reference,
    rounding_weights,
)

Run = Callable[[Staged, Precision, dict[str, np.ndarray]], dict[str, np.ndarray]]
# Relative to the largest output: float32 sums in another order; float16 stores activations with 11 bits.
TOLERANCE = {"f32": 2e-5, "f16": 1e-3}


def check_runs(
    kernels: Kernels, run: Run, precision: Precision, job: Attend, runs: tuple[tuple[int, int, int], ...]
) -> None:
    """Check attention in a step whose rows are `runs`, as many as the job has. Pages that no row sees do not
    exist.
    """
    check(kernels, run, precision, job, arrays=step_inputs(job, runs, np.random.default_rng(1)))


def check_split(
    kernels: Kernels,
    run: Run,
    precision: Precision,
    attend: Attend,
    linear: Linear,
    runs: tuple[tuple[int, int, int], ...],
) -> None:
    """Check attention in parts, followed by the matmul that combines them, against separate attention and
    matmul.
    """
    split = kernels.split(attend, linear)
    assert split is not None
    rng = np.random.default_rng(2)
    arrays = step_inputs(attend, runs, rng)
    whole = reference(attend, arrays)["out"]
    parts = replace(attend, split=split, sinks=False)
    shape, dtype = parts.out
    got = run(kernels.stages(parts), precision, {**arrays, "out": np.full(shape, np.nan, dtype)})
    combined = replace(linear, split=split, split_heads=attend.heads)
    given = inputs(kernels, linear, rng)
    want = reference(linear, {**given, "x": whole})["out"]
    del given["x"], given["w"]
    given |= {name: arrays[name] for name in ("positions", "sinks") if name in arrays}
    given |= {"partial": got["out"], "out": np.full(combined.out[0], 7, np.float32)}
    close(run(kernels.stages(combined), precision, given)["out"].astype(np.float64), want, precision)


def check(
    kernels: Kernels,
    run: Run,
    precision: Precision,
    job: GraphJob,
    seed: int = 1,
    arrays: dict[str, np.ndarray] | None = None,
) -> None:
    """Run a job, with random inputs if none are given, and compare everything that it writes; all else must
    stay unchanged.
    """
    arrays = inputs(kernels, job, np.random.default_rng(seed)) if arrays is None else arrays
    shape, dtype = job.out
    arrays["out"] = np.full(shape, 7, dtype)
    given = {name: array for name, array in arrays.items() if name not in PLAIN}
    got = _run_over_codes(kernels, run, precision, job, given)
    padding = isinstance(job, RopeAppend) and arrays["positions"][: job.m] < 0
    for name, want in reference(job, arrays).items():
        array = got[name].astype(np.float64)
        if name == "out":
            assert (array[job.m :] == 7).all()
            array = array[: job.m]
            assert np.isfinite(array).all()
            array, want = (a[~np.broadcast_to(padding, len(a))] for a in (array, want))
        elif (cached := _paged(job)) is not None and cached.kv_dtype in BITS:
            weights = rounding_weights(job, arrays) if name == "k_cache" else None
            alike = 0.9 if precision == "f32" else 0.5
            quantized_kv.check(array, want, arrays[name], cached.kv_dtype, weights, alike)
            continue
        close(array, want.astype(np.float64), precision)


def _paged(job: GraphJob | Project) -> Paged | None:
    """The part of a job that is about a cache; None for other jobs."""
    if isinstance(job, Project):
        return job.paged
    return job if isinstance(job, Paged) else None


def _run_over_codes(
    kernels: Kernels, run: Run, precision: Precision, job: GraphJob, given: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Run a job over quantized caches, which are given and returned as numbers; words that the job must not
    write must stay unchanged.
    """
    paged = _paged(job)
    if paged is None or paged.kv_dtype not in BITS:
        return run(kernels.stages(job), precision, given)
    numbers = {name: given[name] for name in ("k_cache", "v_cache") if name in given}
    held = {
        name: pages_of(quantized_kv.parts(array, paged.kv_dtype), paged.kv_dtype, innermost=False)
        for name, array in numbers.items()
    }
    got = run(kernels.stages(job), precision, given | held)
    for name, array in numbers.items():
        parts = parts_of(got[name], paged.head_dim, paged.kv_dtype, innermost=False)
        before = parts_of(held[name], paged.head_dim, paged.kv_dtype, innermost=False)
        same = np.all([(parts[part] == before[part]).all(-1) for part in parts], axis=0)
        got[name] = np.where(same[..., None], array, quantized_kv.rows(parts, paged.kv_dtype))
    return got


def close(got: np.ndarray, want: np.ndarray, precision: Precision) -> None:
    """Check that arrays are equal within the precision's rounding, relative to the largest number."""
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-6)
    assert error < TOLERANCE[precision], error


def check_saturation(kernels: Kernels, run: Run, m: int, gate: Activation | None) -> None:
    """Check that values beyond 65,504 are stored as 65,504, since an infinity would turn all that follows
    into NaN; NaN stays NaN.
    """
    job = Linear(m, Matrix(64, 64, 16), "float32", "float16", gate=gate)
    rng = np.random.default_rng(3)
    arrays = inputs(kernels, job, rng)
    weights = arrays.pop("w") * 8  # weights of about unit size
    (arrays["w0"],) = kernels.pack(job.matrix, weights)
    x = rng.standard_normal((m, 64)).astype(np.float32) * np.float32(1e5)
    x[0, 3] = np.nan
    arrays |= {"x": x, "out": np.zeros((m, job.columns), np.float16)}
    with np.errstate(over="ignore"):
        want = x.astype(np.float64) @ weights.T
        if gate is not None:
            want = ACTIVATIONS[gate](want[:, :32]) * want[:, 32:]
    got = run(kernels.stages(job), "f16", arrays)["out"]
    assert np.isnan(got[0]).all()
    beyond, inside = np.abs(want[1:]) > 7e4, np.abs(want[1:]) < 6e4
    assert m == 1 or beyond.mean() > 0.3
    assert (got[1:][beyond] == np.copysign(np.float16(65504), want[1:][beyond])).all()
    assert np.abs(got[1:][inside] - want[1:][inside]).max(initial=0) < 100
    got = run(kernels.stages(job), "f16", {**arrays, "x": np.full((m, 64), 1e6, np.float32)})["out"]
    assert np.abs(got).max() == 65504


UNEVEN: dict[str, Callable[[np.random.Generator, np.ndarray], None]] = {
    "tiny": lambda rng, x: np.multiply(x, 1e-7, out=x),
    "huge": lambda rng, x: np.multiply(x, 1e8, out=x),
    "outliers": lambda rng, x: np.multiply.at(x, (..., rng.integers(0, x.shape[1], 3)), 1e4),
    "growing": lambda rng, x: np.multiply(x, np.geomspace(1e-9, 1e9, x.shape[1]), out=x),
    "sparse": lambda rng, x: np.multiply(x, rng.random(x.shape) < 0.02, out=x),
}
"""Changes of normal inputs after which products in float16 would lose or overflow something."""


def check_uneven(kernels: Kernels, run: Run, name: str, dtype: Float) -> None:
    """Check products of an f16 program with inputs of any size, of one row and of four, with and without a
    norm.

    Rows of float16 are multiplied in float16, rows of float32 in float32. The largest inputs are the largest
    numbers of float16.
    """
    rng, most = np.random.default_rng(5), float(np.finfo(dtype).max)
    for bits, group, m, norm in ((4, 64, 1, None), (4, 32, 4, 1e-30), (8, 64, 1, None), (2, 16, 1, None)):
        job = Linear(m, Matrix(96, 576, bits, group), dtype, "float32", norm=norm)
        arrays = inputs(kernels, job, rng)
        x = arrays["x"].astype(np.float64)
        UNEVEN[name](rng, x)
        check(kernels, run, "f16", job, arrays={**arrays, "x": np.clip(x, -most, most).astype(dtype)})


def check_functions(kernels: Kernels, run: Run) -> None:
    """Check activations within 1e-6 (of 1, or of the value), and softcaps of numbers much larger or smaller
    than the cap.
    """
    x = np.concatenate([np.linspace(-12, 12, 59), [1e-4, -0.02, 0.3, 300, -300]]).astype(np.float32)
    (one,) = kernels.pack(Matrix(64, 64, 32), np.eye(64, dtype=np.float32))
    arrays = {"x": x[None], "w0": one, "out": np.zeros((1, 64), np.float32)}
    for cap in (0.5, 50.0):
        got = run(
            kernels.stages(Linear(1, Matrix(64, 64, 32), "float32", "float32", softcap=cap)), "f32", arrays
        )
        np.testing.assert_allclose(got["out"][0], cap * np.tanh(x.astype(np.float64) / cap), rtol=2e-6)
    (gated,) = kernels.pack(Matrix(128, 64, 32), np.eye(128, 64, dtype=np.float32))
    # the second matrix of the pair gives 1
    arrays |= {"w0": gated, "bias": np.repeat(np.float32([0, 1]), 64)}
    for gate, activation in ACTIVATIONS.items():
        job = Linear(1, Matrix(128, 64, 32), "float32", "float32", gate=gate, bias=True)
        got = run(kernels.stages(job), "f32", arrays)["out"][0]
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(got, activation(x.astype(np.float64)), rtol=2e-6, atol=1e-6)
