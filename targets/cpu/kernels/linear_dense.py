"""Matmul over dense float32 or float16 weights, exact float32 arithmetic; and the second launch of gated jobs of odd width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.epilogue import finish_tile, out_args, out_columns, params
from nearfar.targets.cpu.kernels.rows import norm_scale, source_row, x_args
from nearfar.targets.jobs import Linear
from nearfar.targets.kernels import Stage, Staged

Expr = Any


def linear(job: Linear) -> Staged:
    """Normalise the rows of x into scratch where needed, then a parallel loop over blocks of 16 outputs."""
    w_args = [(f"w{i}", part.shape, part.dtype) for i, part in enumerate(packing.parts(job.matrix))]
    args = [*x_args(job), *w_args, *out_args(job)]
    staged_x = job.norm is not None or job.rows
    scratch = (((job.m, job.matrix.k), "float32"),) if staged_x else ()
    args[-1:-1] = [("scratch:0", shape, dtype) for shape, dtype in scratch]

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        x = buf["scratch:0"] if staged_x else buf["x"]
        if staged_x:
            with T.serial(0, job.m) as m:
                _prepare_row(job, buf, m, x)
        _matmul(job, buf, x)

    func = v.prim_func("linear", [(name.replace(":", "_"), shape, dtype) for name, shape, dtype in args], body)
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


def _matmul(job: Linear, buf: dict[str, Expr], x: Expr) -> None:
    tile = 4 if job.m % 4 == 0 else 1
    n = out_columns(job)
    with T.parallel(0, packing.blocks(n)) as block, T.serial(0, job.m // tile) as t:
        acc = v.registers(tile * 2)
        _accumulate(job, buf["w0"], x, block, t * tile, tile, acc)
        up = None
        if job.gated:
            up = v.registers(tile * 2)
            _accumulate(job, buf["w0"], x, block + packing.blocks(n), t * tile, tile, up)
        finish_tile(job, buf, block, t * tile, tile, [v.i32(0), v.i32(1)], acc, up)


def _accumulate(job: Linear, weight: Expr, x: Expr, block: Expr, row: Expr, tile: int, acc: Expr) -> None:
    for i in range(tile * 2):
        v.put1(acc, [i], v.splat(0.0))
    with T.serial(0, job.matrix.k) as k:
        weights = [v.cast(v.lanes(weight, [block, k, half * v.LANES]), v.F32X8) for half in range(2)]
        for r in range(tile):
            for half in range(2):
                v.put1(acc, [r * 2 + half], acc[r * 2 + half] + weights[half] * v.splat(x[row + r, k]))


def gated_by_parts(job: Linear, linear_of: Any) -> Staged:
    """A gated job whose width is no multiple of a block: the plain matmul, then silu(gate) * up in a launch of its own."""
    plain = linear_of(replace(job, gated=False, residual=False))
    both, n = len(plain.scratch), out_columns(job)
    stages = [Stage(s.func, tuple(f"scratch:{both}" if a == "out" else a for a in s.args)) for s in plain.stages]
    # `rows` writes the first m rows of a 16-row buffer.
    rows = 16 if job.rows else job.m
    args = [(f"scratch:{both}", (rows, 2 * n), job.out_dtype), *out_args(replace(job, bias=False))]

    def body(*buffers: Expr) -> None:
        gate_up, out = buffers[0], buffers[-1]
        with T.parallel(0, job.m) as m, T.serial(0, n) as i:
            gate = T.Bind(tirx.Cast("float32", gate_up[m, i]))
            value = T.Bind(gate / (v.f32(1.0) + tirx.exp(v.f32(0.0) - gate)) * tirx.Cast("float32", gate_up[m, n + i]))
            if job.residual:
                value = T.Bind(value + tirx.Cast("float32", buffers[1][m, i]))
            v.put1(out, [m, i], tirx.Cast(job.out_dtype, value))

    func = v.prim_func("gate", [(name.replace(":", "_"), shape, dtype) for name, shape, dtype in args], body)
    stages.append(Stage(func, params(args)))
    return Staged(tuple(stages), (*plain.scratch, ((rows, 2 * n), job.out_dtype)))
