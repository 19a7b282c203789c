"""Matmul over dense float32 or float16 weights, in float32 arithmetic."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import tile
from nearfar.targets.cpu.kernels.epilogue import finish_tile, out_args, params
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.half import widen
from nearfar.targets.cpu.kernels.rows import norm_scale, source_row, x_args
from nearfar.targets.cpu.units import Unit

Expr = Any


def linear(job: Linear, unit: Unit) -> Staged:
    """The launch of a matmul: rows of x are normalized or gathered into scratch if the job needs it, then a
    parallel loop computes blocks of 16 outputs.
    """
    w_args = [(f"w{i}", part.shape, part.dtype) for i, part in enumerate(packing.parts(job.matrix))]
    staged_x = job.norm is not None or job.rows
    scratch = (((job.m, job.matrix.k), "float32"),) if staged_x else ()
    rows, _ = tile(unit, job.m, 1, (v.ROWS,))
    job = opened(job)
    args = [*x_args(job), *w_args, *out_args(job)]
    args[-1:-1] = [("scratch:0", (job.m, job.matrix.k), "float32")] * staged_x

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        x = buf["scratch:0"] if staged_x else buf["x"]
        if staged_x:
            with T.serial(0, job.m) as m:
                _prepare_row(job, buf, m, x)
        _matmul(job, unit, buf, x, rows)

    func = v.prim_func(
        "linear", [(name.replace(":", "_"), shape, dtype) for name, shape, dtype in args], body
    )
    return Staged((Stage(func, params(args)),), scratch)


def _prepare_row(job: Linear, buf: dict[str, Expr], m: Expr, out: Expr) -> None:
    x, row, k = buf["x"], source_row(job, buf.get("logit_rows"), m), job.matrix.k
    if job.norm is None:
        with T.serial(0, k) as i:
            v.put1(out, [m, i], x[row, i])
        return
    rms = norm_scale(x, row, k, job.norm)
    with T.serial(0, k) as i:
        v.put1(out, [m, i], x[row, i] * rms * buf["norm"][i])


def _matmul(job: Linear, unit: Unit, buf: dict[str, Expr], x: Expr, rows: int) -> None:
    n = job.columns
    with v.parallel(packing.blocks(n)) as block, T.serial(0, job.m // rows) as t:
        acc = v.local((rows, v.ROWS), "float32")
        accumulate(job.matrix, unit, buf["w0"], x, block, t * rows, rows, acc)
        up = None
        if job.gate is not None:
            up = v.local((rows, v.ROWS), "float32")
            accumulate(job.matrix, unit, buf["w0"], x, block + packing.blocks(n), t * rows, rows, up)
        finish_tile(job, buf, block, t * rows, rows, acc, up)


def accumulate(
    matrix: Matrix, unit: Unit, weight: Expr, x: Expr, block: Expr, row: Expr, rows: int, acc: Expr
) -> None:
    """acc[r] = x[row + r] · W[block]ᵀ."""
    for r in range(rows):
        v.put(acc, [r, 0], v.splat(0.0))
    with T.serial(0, matrix.k) as k:
        weights = v.lanes(weight, [block, k, 0])
        weights = widen(unit, weights, finite=True) if matrix.bits == 16 else weights
        for r in range(rows):
            v.put(acc, [r, 0], v.lanes(acc, [r, 0]) + weights * v.splat(x[row + r, k]))
