"""Matmul over affine weights of 2 to 8 bits: out = epilogue(x' · Wᵀ), in one launch.

Activations are quantized to 16 bits by groups in the same launch and multiplied as integers (dot.py). The
usual 8 bits do not suffice: the greedy text must be that of float32 on the dequantized weights, and 8 bits
change logits by percents. 16 bits cost little more. At one row memory is the limit; with many rows there are
twice as many products of bytes, or two vpmaddwd in place of a vpmaddubsw, a vpmaddwd with ones, and the
handling of signs.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import SUMS, Products, Reader, Words, products, tile, turn
from nearfar.targets.cpu.kernels.epilogue import finish_tile, out_args, params
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.half import widen
from nearfar.targets.cpu.kernels.rows import quantise_row, x_args
from nearfar.targets.cpu.units import Unit

Expr = Any


def linear(job: Linear, unit: Unit) -> Staged:
    """The launch of a matmul: the rows of x are quantized, then a parallel loop computes blocks of 16
    outputs.
    """
    matrix = job.matrix
    (part,) = packing.parts(matrix)
    dot = products(unit, matrix, *tile(unit, job.m, SUMS[unit.dot]))
    scratch = _scratch(job, dot)
    job = opened(job)
    s_args = [(f"scratch:{i}", shape, dtype) for i, (shape, dtype) in enumerate(_scratch(job, dot))]
    args = [*x_args(job), ("w0", part.shape, part.dtype), *out_args(job)]
    args[-1:-1] = s_args  # the output stays last

    def body(*buffers: Expr) -> None:
        _body(job, unit, dot, dict(zip([name for name, *_ in args], buffers, strict=True)))

    func = v.prim_func(
        "linear", [(name.replace(":", "_"), shape, dtype) for name, shape, dtype in args], body
    )
    return Staged((Stage(func, params(args)),), scratch)


def _scratch(job: Linear, dot: Products) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of the scratch: the rows as integers, and the scales and sums of their groups.

    Rows of a tile are interleaved into one stream, whatever k is (rows 16 KiB apart would share a set of the
    L1 cache).
    """
    matrix, rows = job.matrix, dot.rows
    return (
        ((job.m // rows, matrix.k // 2 * rows), "int32"),
        ((job.m // rows, matrix.k // matrix.group, 3 if dot.offset else 2, rows), "float32"),
    )


def _body(job: Linear, unit: Unit, dot: Products, buf: dict[str, Expr]) -> None:
    with v.rows(job.m) as m:
        quantise_row(job, dot, buf, m, buf["scratch:0"], buf["scratch:1"])
    with v.parallel(packing.blocks(job.columns)) as block, T.serial(0, job.m // dot.rows) as t:
        acc = v.local((dot.rows, v.ROWS), "float32")
        accumulate(job.matrix, unit, dot, buf, block, t, acc)
        up = None
        if job.gate is not None:
            up = v.local((dot.rows, v.ROWS), "float32")
            accumulate(job.matrix, unit, dot, buf, block + packing.blocks(job.columns), t, up)
        finish_tile(job, buf, block, t * dot.rows, dot.rows, acc, up)


def accumulate(
    matrix: Matrix, unit: Unit, dot: Products, buf: dict[str, Expr], block: Expr, t: Expr, acc: Expr
) -> None:
    """acc[row] = x'[rows of tile t] · W[block]ᵀ, for some columns of the block at a time."""
    for r in range(dot.rows):
        v.put(acc, [r, 0], v.splat(0.0))
    columns = dot.pieces * unit.lanes
    if columns == v.ROWS:
        return _columns(matrix, unit, dot, buf, block, t, v.i32(0), acc)
    with T.serial(0, v.ROWS // columns) as some:
        _columns(matrix, unit, dot, buf, block, t, some * columns, acc)


def _columns(
    matrix: Matrix,
    unit: Unit,
    dot: Products,
    buf: dict[str, Expr],
    block: Expr,
    t: Expr,
    column: Expr,
    acc: Expr,
) -> None:
    """Compute the columns of a block from `column` on.

    Per group: an exact integer sum of 16-bit products, then scale·(Σ q x) + bias·(Σ x) in float32.
    """
    step, n = turn(matrix), unit.lanes
    sums_x, float_n = buf["scratch:1"], f"float32x{unit.lanes}"
    at = [column + piece * n for piece in range(dot.pieces)]
    with T.serial(0, matrix.k // matrix.group) as g:
        sums = dot.zero()
        with T.serial(0, matrix.group // step) as c:
            codes = [dot.codes(_words(matrix, unit, buf["w0"], block, g, c, first)) for first in at]
            begin = T.Bind((g * (matrix.group // 2) + c * (step // 2)) * dot.rows)
            dot.add(sums, codes, Reader(unit, buf["scratch:0"], t, begin))
        for piece, first in enumerate(at):
            scale, bias = affine(matrix, unit, buf["w0"], block, g, first, n)
            for r in range(dot.rows):
                total = dot.total(sums, r, piece)
                if dot.offset:
                    of_inputs = T.Bind(v.bits(sums_x[t, g, 2, r], "int32") * v.i32(dot.offset))
                    total = T.Bind(total + v.splat(of_inputs, n))
                scaled = T.Bind(scale * v.splat(sums_x[t, g, 0, r], n))
                value = T.Bind(v.lanes(acc, [r, first], n) + v.cast(total, float_n) * scaled)
                v.put(acc, [r, first], value + bias * v.splat(sums_x[t, g, 1, r], n), n)


def _words(matrix: Matrix, unit: Unit, w: Expr, block: Expr, g: Expr, c: Expr, first: Expr) -> Words:
    """The words of each plane that hold turn c of group g, for the columns from `first` on."""
    words = []
    for plane, line in zip(packing.PLANES[matrix.bits], packing.first_lines(matrix), strict=False):
        count = max(1, turn(matrix) // (packing.QUAD * plane.quads))
        lines = [line + c * count + i for i in range(count)]
        words.append(
            [
                T.Bind(v.bits(v.lanes(w, [block, g, i, first], unit.lanes), f"int32x{unit.lanes}"))
                for i in lines
            ]
        )
    return words


def affine(
    matrix: Matrix, unit: Unit, w: Expr, block: Expr, g: Expr, first: Expr, n: int
) -> tuple[Expr, Expr]:
    """Scales and biases of a group, for n columns from `first` on."""
    line = packing.first_lines(matrix)[-1]
    scale, bias = (
        T.Bind(v.bits(v.lanes(w, [block, g, line, half * 8 + first // 2], n // 2), f"float16x{n}"))
        for half in range(2)
    )
    return widen(unit, scale, n, finite=True), widen(unit, bias, n, finite=True)
