"""Rows of the embedding matrix, which lies in memory like every other matrix (it may be the lm_head as well)."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.kernels import Stage, Staged
from nearfar.targets.quantized import Matrix

Expr = Any


def embed(m: int, matrix: Matrix) -> Staged:
    """Out f32 [m, k] = row tokens[m] of the matrix."""
    w_args = [(f"w{i}", part.shape, part.dtype) for i, part in enumerate(packing.parts(matrix))]
    args = [("tokens", (256,), "int32"), *w_args, ("out", (m, matrix.k), "float32")]

    def body(tokens: Expr, *rest: Expr) -> None:
        weights, out = rest[:-1], rest[-1]
        with T.serial(0, m) as row:
            token = T.Bind(tirx.max(tirx.min(tokens[row], matrix.n - 1), 0))
            block, lane = T.Bind(token // v.ROWS), T.Bind(token % v.ROWS)
            if matrix.quantized:
                _quantized_row(matrix, weights[0], weights[1], block, lane, out, row)
            else:
                with T.serial(0, matrix.k) as k:
                    v.put1(out, [row, k], tirx.Cast("float32", weights[0][block, k, lane]))

    func = v.prim_func("embed", args, body)
    return Staged((Stage(func, tuple(name for name, *_ in args)),))


def _quantized_row(matrix: Matrix, codes: Expr, affine: Expr, block: Expr, lane: Expr, out: Expr, row: Expr) -> None:
    step = packing.per_word(matrix.bits)
    with T.serial(0, matrix.k // matrix.group) as g:
        scale = T.Bind(tirx.Cast("float32", affine[block, g, 0, lane]))
        bias = T.Bind(tirx.Cast("float32", affine[block, g, 1, lane]))
        with T.serial(0, matrix.group // step) as c:
            word = T.Bind(codes[block, g * (matrix.group // step) + c, lane])
            for i in range(step):
                code = (word >> tirx.IntImm("uint32", (i // 2) * matrix.bits + (i % 2) * 16)) & tirx.IntImm("uint32", 2**matrix.bits - 1)
                v.put1(out, [row, g * matrix.group + c * step + i], tirx.Cast("float32", code) * scale + bias)
