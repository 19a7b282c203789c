"""Looks up rows of the embedding matrix, which is packed like every other (it may be the lm_head as well)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Embed
from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import turn
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.linear_quant import affine
from nearfar.targets.cpu.units import Unit

Expr = Any


def embed(job: Embed, unit: Unit) -> Staged:
    """The launches of an Embed job."""
    job, matrix = opened(job), job.matrix
    w_args = [(f"w{i}", part.shape, part.dtype) for i, part in enumerate(packing.parts(matrix))]
    args = [("tokens", (MAX_STEP,), "int32"), *w_args, ("out", *job.out)]

    def body(tokens: Expr, *rest: Expr) -> None:
        weights, out = rest[:-1], rest[-1]

        def put(row: Expr, k: Expr, value: Expr) -> None:
            v.put1(out, [row, k], value if job.scale == 1.0 else value * v.f32(job.scale))

        with v.rows(job.m) as row:
            token = T.Bind(tirx.max(tirx.min(tokens[row], matrix.n - 1), 0))
            block, lane = T.Bind(token // v.ROWS), T.Bind(token % v.ROWS)
            if matrix.quantized:
                with T.serial(0, matrix.k // matrix.group) as g:
                    _group(matrix, unit, weights[0], block, lane, g, functools.partial(put, row))
            else:
                with T.serial(0, matrix.k) as k:
                    put(row, k, tirx.Cast("float32", weights[0][block, k, lane]))

    func = v.prim_func("embed", args, body)
    return Staged((Stage(func, tuple(name for name, *_ in args)),))


def _group(
    matrix: Matrix, unit: Unit, w: Expr, block: Expr, lane: Expr, g: Expr, put: Callable[[Expr, Expr], None]
) -> None:
    """Unpack one group of a row: calls put(k, value) for each number."""
    step, first = turn(matrix), packing.first_lines(matrix)
    both = v.local((2, v.ROWS), "float32")
    for half, values in enumerate(affine(matrix, unit, w, block, g, v.i32(0), v.ROWS)):
        v.put(both, [half, 0], values)
    scale, bias = T.Bind(both[0, lane]), T.Bind(both[1, lane])
    with T.serial(0, matrix.group // step) as c:
        for i in range(step):
            code = tirx.IntImm("uint32", 0)
            for plane, line in zip(packing.PLANES[matrix.bits], first, strict=False):
                codes = packing.QUAD * plane.quads
                word = w[block, g, line + c * max(1, step // codes) + i // codes, lane]
                part = (word >> _u32(plane.place(i % codes))) & _u32(plane.mask)
                code = code | (part << _u32(plane.low))
            put(g * matrix.group + c * step + i, tirx.Cast("float32", code) * scale + bias)


def _u32(value: int) -> Expr:
    return tirx.IntImm("uint32", value)
