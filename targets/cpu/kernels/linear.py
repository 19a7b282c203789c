"""Chooses the kernel of a linear job, and adds a second launch to gated jobs whose width is not a multiple of
a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.errors import BuildError
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Linear
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import linear_dense, linear_quant
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.epilogue import bounded, out_args, params
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.units import Unit

Expr = Any


def linear(job: Linear, unit: Unit) -> Staged:
    """The launches of a Linear job."""
    if (job.x_dtype, job.out_dtype) != ("float32", "float32"):
        raise BuildError(f"the cpu target has float32 activations only, not {job.x_dtype} to {job.out_dtype}")
    kernel = linear_quant.linear if job.matrix.quantized else linear_dense.linear
    gated_by_parts = job.gate is not None and (job.columns % packing.ROWS or job.matrix.pieces)
    return _gated_by_parts(job, unit, kernel) if gated_by_parts else kernel(job, unit)


def _gated_by_parts(job: Linear, unit: Unit, kernel: Callable[[Linear, Unit], Staged]) -> Staged:
    """The plain matmul, then activation(gate) * up and the rest of the epilogue in a launch of their own."""
    plain = kernel(replace(job, gate=None, softcap=None, residual=False), unit)
    both, n = len(plain.scratch), job.columns
    stages = [
        Stage(s.func, tuple(f"scratch:{both}" if a == "out" else a for a in s.args)) for s in plain.stages
    ]
    gate_up = ((job.out[0][0], 2 * n), job.out_dtype)
    job = opened(job)
    args = [(f"scratch:{both}", (job.out[0][0], 2 * n), job.out_dtype), *out_args(replace(job, bias=False))]

    def body(*buffers: Expr) -> None:
        pairs, out = buffers[0], buffers[-1]

        def some(m: Expr, i: Expr, count: int) -> None:
            value = bounded(job, v.some(pairs, [m, i], count), v.some(pairs, [m, i + n], count))
            if job.residual:
                value = T.Bind(value + v.some(buffers[1], [m, i], count))
            v.put_some(out, [m, i], value, count)

        with v.parallel(job.m) as m:
            with T.serial(0, n // v.LANES) as i:
                some(m, i * v.LANES, v.LANES)
            if n % v.LANES:
                some(m, v.i32(n - n % v.LANES), n % v.LANES)

    func = v.prim_func("gate", [(name.replace(":", "_"), shape, dtype) for name, shape, dtype in args], body)
    return Staged((*stages, Stage(func, params(args))), (*plain.scratch, gate_up))
