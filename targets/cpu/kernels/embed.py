"""Rows of the embedding matrix, which lies in memory like every other (it may be the lm_head as well)."""

from __future__ import annotations

import functools
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.units import Unit
from nearfar.targets.jobs import Embed
from nearfar.targets.kernels import Stage, Staged
from nearfar.targets.quantized import Matrix

Expr = Any


def embed(job: Embed, unit: Unit) -> Staged:
    """See Embed."""
    matrix = job.matrix
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
                    _group(matrix, weights, block, lane, g, functools.partial(put, row))
            else:
                with T.serial(0, matrix.k) as k:
                    put(row, k, tirx.Cast("float32", weights[0][block, k, lane]))

    func = v.prim_func("embed", args, body)
    return Staged((Stage(func, tuple(name for name, *_ in args)),))


def _group(matrix: Matrix, weights: tuple[Expr, ...], block: Expr, lane: Expr, g: Expr, put: Any) -> None:
    """The numbers of one group of a row, each to put(k, value)."""
    step, affine = packing.step(matrix), weights[-1]
    scale = T.Bind(tirx.Cast("float32", affine[block, g, 0, lane]))
    bias = T.Bind(tirx.Cast("float32", affine[block, g, 1, lane]))
    with T.serial(0, matrix.group // step) as c:
        for i in range(step):
            code = tirx.IntImm("uint32", 0)
            for plane, words in zip(packing.PLANES[matrix.bits], weights[:-1], strict=True):
                first, down = packing.first_word(matrix, plane, g, c)
                word = words[block, first + i // plane.per_word, lane]
                place = tirx.Cast("uint32", v.i32(plane.place(i % plane.per_word)) + down)
                part = (word >> place) & tirx.IntImm("uint32", plane.mask)
                code = code | (part << tirx.IntImm("uint32", plane.low))
            put(g * matrix.group + c * step + i, tirx.Cast("float32", code) * scale + bias)
