"""Matmul over quantized weights of 2 to 8 bits: out = epilogue(x' · Wᵀ), in one launch.

Activations are quantized to 16 bits by groups in the same launch and multiplied as integers (dot.py). The
usual 8 bits do not suffice: the greedy text must be that of float32 on the dequantized weights, and 8 bits
change logits by percents. 16 bits cost little more. At one row memory is the limit; with many rows there are
twice as many products of bytes, or two vpmaddwd in place of a vpmaddubsw, a vpmaddwd with ones, and the
handling of signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Linear
from nearfar.kernels.pieces import placed
from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import SUMS, DotSums, InputReader, Words, lines, products, tile, turn
from nearfar.targets.cpu.kernels.epilogue import finish_tile, out_args, params
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.rows import quantise_row, x_args
from nearfar.targets.cpu.kernels.scales import OfGroup, SpanScales
from nearfar.targets.cpu.packing import BlockLayout
from nearfar.targets.cpu.units import Unit

Expr = Any
AHEAD = 128
"""The number of lines between a line that a kernel reads and the line that it prefetches.

Left to its own prefetcher, a thread of a Zen 5 read 33 to 38 GB/s of one-level matrices, and 14 to 21 GB/s of
two-level ones. With 64 lines it read 32 to 39 GB/s of each, with 128 lines 38 to 41: the rate of its memory.
"""


def linear(job: Linear, unit: Unit) -> Staged:
    """The launch of a matmul: the rows of x are quantized, then a parallel loop computes blocks of 16
    outputs; one loop for each piece of the matrix.
    """
    shape = tile(unit, job.m, SUMS[unit.dot])
    found = placed(job.matrix)
    dots = [products(unit, piece.matrix, *shape) for piece in found]
    parts = [part for piece in found for part in packing.parts(piece.matrix)]
    rounded = _Rounded.of(dots)
    scratch = rounded.scratch(job)
    job = opened(job)
    s_args = [(f"scratch:{i}", shape, dtype) for i, (shape, dtype) in enumerate(rounded.scratch(job))]
    w_args = [(f"w{i}", part.shape, part.dtype) for i, part in enumerate(parts)]
    args = [*x_args(job), *w_args, *out_args(job)]
    args[-1:-1] = s_args  # the output stays last

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        with v.rows(job.m) as m:
            for i, dot in enumerate(rounded.dots):
                quantise_row(job, dot, rounded.corrected[i], buf, m, *rounded.of_index(buf, i))
        for i, (piece, dot) in enumerate(zip(found, dots, strict=True)):
            one = replace(job, matrix=piece.matrix, first=piece.first, of=job.matrix.n)
            xq, xs = rounded.of_index(buf, rounded.index(dot))
            _body(one if job.matrix.pieces else job, unit, dot, buf | {"w": buf[f"w{i}"], "xq": xq, "xs": xs})

    func = v.prim_func(
        "linear", [(name.replace(":", "_"), shape, dtype) for name, shape, dtype in args], body
    )
    return Staged((Stage(func, params(args)),), scratch)


@dataclass(frozen=True)
class _Rounded:
    """The rows of x as integers, once for each group size of the pieces. `corrected`: whether products need
    the sums of a group's integers.
    """

    dots: tuple[DotSums, ...]
    corrected: tuple[bool, ...]

    @staticmethod
    def of(dots: Sequence[DotSums]) -> _Rounded:
        """The roundings that these products of one unit need."""
        groups = {dot.matrix.group: dot for dot in reversed(dots)}
        needs = {dot.matrix.group for dot in dots if dot.correction}
        return _Rounded(tuple(groups.values()), tuple(group in needs for group in groups))

    def index(self, dot: DotSums) -> int:
        """The number of the rounding that products read."""
        return [each.matrix.group for each in self.dots].index(dot.matrix.group)

    def of_index(self, buf: dict[str, Expr], index: int) -> tuple[Expr, Expr]:
        """The buffers of a rounding: integers, and scales and sums."""
        return buf[f"scratch:{2 * index}"], buf[f"scratch:{2 * index + 1}"]

    def scratch(self, job: Linear) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shapes and dtypes of the scratch.

        Rows of a tile are interleaved into one stream, whatever k is (rows 16 KiB apart would share a set of
        the L1 cache).
        """
        k = job.matrix.k
        made: list[tuple[tuple[int, ...], str]] = []
        for dot, corrected in zip(self.dots, self.corrected, strict=True):
            groups, rows = k // dot.matrix.group, dot.rows
            made.append(((job.m // rows, k // 2 * rows), "int32"))
            made.append(((job.m // rows, groups, 3 if corrected else 2, rows), "float32"))
        return tuple(made)


def _body(job: Linear, unit: Unit, dot: DotSums, buf: dict[str, Expr]) -> None:
    with v.parallel(packing.blocks(job.columns)) as block, T.serial(0, job.m // dot.rows) as t:
        acc = v.local((dot.rows, v.ROWS), "float32")
        accumulate(job.matrix, unit, dot, buf, block, t, acc)
        up = None
        if job.gate is not None:
            up = v.local((dot.rows, v.ROWS), "float32")
            accumulate(job.matrix, unit, dot, buf, block + packing.blocks(job.columns), t, up)
        finish_tile(job, buf, block, t * dot.rows, dot.rows, acc, up)


def accumulate(
    matrix: Matrix, unit: Unit, dot: DotSums, buf: dict[str, Expr], block: Expr, t: Expr, acc: Expr
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
    dot: DotSums,
    buf: dict[str, Expr],
    block: Expr,
    t: Expr,
    column: Expr,
    acc: Expr,
) -> None:
    """Compute the columns of a block from `column` on.

    Per group: an exact integer sum of 16-bit products, then scale·(Σ q x) + offset·(Σ x) in float32.
    """
    layout, n = BlockLayout(matrix), unit.lanes
    at = [column + piece * n for piece in range(dot.pieces)]
    group = _Group(layout, unit, dot, buf, t, acc)
    each, cells = layout.span // layout.cell, matrix.k // layout.cell

    def some(span: Expr, count: int) -> None:
        if dot.streams and layout.levels:
            ahead(buf["w"], (block, span), layout.scale_start, layout.scale_lines)
        scales = SpanScales(layout, unit, buf["w"], block, span)
        columns = [(first, scales.columns(first, n)) for first in at]
        with T.serial(0, count) as cell:
            for inside in range(layout.cell // matrix.group):
                group.add(block, span, cell, inside, columns)
        if dot.streams and not layout.levels:
            ahead(buf["w"], (block, span), layout.scale_start, layout.scale_lines)

    with T.serial(0, cells // each) as span:
        some(span, each)
    if cells % each:
        some(v.i32(cells // each), cells % each)


@dataclass(frozen=True)
class _Group:
    """Adds the products of a group of inputs to `acc`, for the rows of tile `t`."""

    layout: BlockLayout
    unit: Unit
    dot: DotSums
    buf: dict[str, Expr]
    t: Expr
    acc: Expr

    def add(
        self, block: Expr, span: Expr, cell: Expr, inside: int, columns: list[tuple[Expr, OfGroup]]
    ) -> None:
        """Add group `inside` of a cell of a span; `columns`: the first column of each register, and its
        scales.
        """
        matrix, dot, n = self.layout.matrix, self.dot, self.unit.lanes
        step, of_cell = turn(matrix), self.layout.cell // matrix.group
        in_span = T.Bind(cell * of_cell + inside) if of_cell > 1 else cell
        g = T.Bind(span * self.layout.groups + in_span)
        sums, sums_x, float_n = dot.zero(), self.buf["xs"], f"float32x{n}"
        with T.serial(0, matrix.group // step) as c:
            if dot.streams:
                for line, count in lines(self.layout, cell, inside, c):
                    ahead(self.buf["w"], (block, span), line, count)
            codes = [
                dot.codes(
                    words(self.layout, self.unit, self.buf["w"], (block, span), cell, inside, c, first),
                    inside * (matrix.group // packing.QUAD),
                )
                for first, _ in columns
            ]
            begin = T.Bind((g * (matrix.group // 2) + c * (step // 2)) * dot.rows)
            dot.add(sums, codes, InputReader(self.unit, self.buf["xq"], self.t, begin))
        for piece, (first, scales) in enumerate(columns):
            scale, offset = scales(in_span)
            for r in range(dot.rows):
                total = dot.total(sums, r, piece)
                if dot.correction:
                    of_inputs = v.bits(sums_x[self.t, g, 2, r], "int32") * v.i32(dot.correction)
                    total = T.Bind(total + v.splat(T.Bind(of_inputs), n))
                scaled = T.Bind(scale * v.splat(sums_x[self.t, g, 0, r], n))
                value = v.lanes(self.acc, [r, first], n) + v.cast(total, float_n) * scaled
                if offset is not None:
                    value = T.Bind(value) + offset * v.splat(sums_x[self.t, g, 1, r], n)
                v.put(self.acc, [r, first], value, n)


def words(
    layout: BlockLayout,
    unit: Unit,
    w: Expr,
    at: tuple[Expr, Expr],
    cell: Expr,
    inside: int,
    c: Expr,
    first: Expr,
) -> Words:
    """The words of each plane that hold turn c of group `inside` of a cell, for the columns from `first` on.

    `at`: the block and the span.
    """
    n = unit.lanes
    return [
        [T.Bind(v.bits(v.lanes(w, [*at, line + i, first], n), f"int32x{n}")) for i in range(count)]
        for line, count in lines(layout, cell, inside, c)
    ]


def ahead(w: Expr, at: tuple[Expr, Expr], line: Expr, count: int) -> None:
    """Prefetch the lines that are AHEAD lines behind some lines of a span; behind a matrix nothing is lost.

    Prefetches must have the order of the lines: in another order, those of Q5_0 made its product slower.
    """
    for i in range(count):
        v.prefetch(w, [*at, line + (i + AHEAD), 0])
