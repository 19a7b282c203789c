"""Matmuls of rows that are rounded to bytes: the jobs, and the expected results of their two launches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nearfar.kernels.contract import Kernels, Precision, Staged
from nearfar.kernels.jobs import Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.linear.matmul_int8 import int8_products

from .gpu_checks import Run, close
from .gpu_inputs import inputs
from .gpu_jobs import MATRICES, SCHEMES, STORED, TABLED, linears
from .job_reference import reference, rms_norm

INPUTS = 32
"""Inputs that share a scale."""
FAR = 0.03
"""How far rounding may move an output, as a share of the largest: rows have an input of 40 among numbers of
about 1.
"""


def jobs(dtype: str) -> dict[str, Linear]:
    """Everything that is fused with a matmul, all bits and groups, and rows, columns and inputs that do not
    fill a tile.
    """
    out = {}
    for i, (name, make) in enumerate(linears(dtype).items()):
        job = make((16, 33, 64)[i % 3])
        if not job.rows:
            out[name] = job if int8_products(job.matrix) else replace(job, matrix=MATRICES["q4g64"])
    for name in ("q2g32", "q2g128", "q4g32", "q4g128", "q8g32", "q8g64", "q8g128"):
        out[name] = Linear(16, SCHEMES[name], "float32", dtype, norm=1e-5)
    for name in ("q4g32s", "q8g32s", "q4g32k6o", *TABLED):
        matrix = STORED[name]
        out[name] = Linear(33, replace(matrix, n=matrix.n // 4 * 4), dtype, dtype, bias=True)
    out["ragged"] = Linear(200, Matrix(136, 160, 8, 32), dtype, dtype)
    out["five"] = Linear(5, MATRICES["q4g32"], dtype, dtype, residual=True)
    return out


def check(kernels: Kernels, run: Run, precision: Precision, job: Linear) -> None:
    """Check that the rows are rounded to the nearest byte, and that the product is that of the rounded rows
    and near the exact one.
    """
    staged = kernels.stages(job)
    first, second = staged.stages
    arrays = inputs(kernels, job, np.random.default_rng(1))
    arrays["x"][1] = 0
    for i, (shape, dtype) in enumerate(staged.scratch):
        arrays[f"scratch:{i}"] = np.full(shape, 7, dtype)
    arrays["out"] = np.zeros(*job.out)
    given = {name: array for name, array in arrays.items() if name != "w"}
    got = run(Staged((first,)), precision, {name: given[name] for name in first.args})
    codes, scales = unpacked(job, got["scratch:0"]), got["scratch:1"]
    check_rounded(job, arrays, codes, scales)
    given |= {name: got[name] for name in ("scratch:0", "scratch:1")}
    out = run(Staged((second,)), precision, {name: given[name] for name in second.args})["out"]
    factors = scales[:, ::2][:, : job.matrix.k // INPUTS]
    x = (codes.reshape(job.m, -1, INPUTS) * factors[..., None].astype(np.float64)).reshape(job.m, -1)
    want = reference(replace(job, norm=None), {**arrays, "x": x})["out"]
    close(out.astype(np.float64), want, precision)
    if job.softcap is not None:  # all outputs are near the cap
        return
    true = reference(job, arrays)["out"]
    assert np.abs(out - true).max() < FAR * np.abs(true).max()
    assert (out.argmax(1) == true.argmax(1)).mean() > 0.9


def check_rounded(job: Linear, arrays: dict[str, np.ndarray], codes: np.ndarray, scales: np.ndarray) -> None:
    """Check codes [m, k], their scales and their sums; codes beyond k must be 0."""
    x = arrays["x"].astype(np.float64)
    if job.norm is not None:
        x = rms_norm(x, job.norm, arrays["norm"])
    x, blocks = x.reshape(job.m, -1, INPUTS), codes.reshape(job.m, -1, INPUTS)
    count = x.shape[1]
    scale, total = scales[:, ::2], scales[:, 1::2]
    np.testing.assert_allclose(scale[:, :count], np.abs(x).max(-1) / 127, rtol=1e-5)
    np.testing.assert_allclose(total[:, :count], scale[:, :count] * blocks.sum(-1), rtol=1e-5)
    assert (scales[:, 2 * count :] == 0).all()
    exact = x / np.maximum(scale[:, :count], 1e-30)[..., None]
    assert np.abs(exact - blocks).max() < 0.5 + 1e-3
    assert (np.rint(exact) == blocks).mean() > 0.999
    assert np.abs(blocks).max(-1)[x.any(-1)].min() == 127


def unpacked(job: Linear, words: np.ndarray) -> np.ndarray:
    """The bytes of each row by input: the bytes of a word are as far apart as the codes that one
    mask takes.
    """
    apart = 8 // job.matrix.bits
    found = words.view(np.int8).reshape(job.m, -1, apart, 4).swapaxes(2, 3).reshape(job.m, -1)
    assert not found[:, job.matrix.k :].any()
    return found[:, : job.matrix.k].astype(np.int64)


def check_not_finite(kernels: Kernels, run: Run) -> None:
    """Check that a number that is not finite shows in its whole row, and in no other."""
    job = Linear(16, MATRICES["q4g64"], "float32", "float32", norm=1e-5)
    arrays = inputs(kernels, job, np.random.default_rng(1))
    arrays["x"][3, 5], arrays["x"][7, 100] = np.nan, np.inf
    arrays["out"] = np.zeros(*job.out)
    given = {name: array for name, array in arrays.items() if name != "w"}
    got = run(kernels.stages(job), "f32", given)["out"]
    bad = ~np.isfinite(got)
    assert bad[[3, 7]].all()
    assert bad.sum() == 2 * got.shape[1]
