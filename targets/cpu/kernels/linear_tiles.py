"""Products of quantized weights tile after tile: each tile of rows reads and unpacks a block's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import groups
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import DotSums, InputReader, lines, turn
from nearfar.targets.cpu.kernels.rounded import Rounded
from nearfar.targets.cpu.kernels.scales import OfGroup, SpanScales
from nearfar.targets.cpu.packing import BlockLayout
from nearfar.targets.cpu.units import Unit

Expr = Any
AHEAD = 128
"""The number of lines between a line that a kernel reads and the line that it prefetches.

Left to its own prefetcher, a thread of a Zen 5 read 33 to 38 GB/s of one-level matrices, and 14 to 21 GB/s of
two-level ones. With 64 lines it read 32 to 39 GB/s of each, with 128 lines 38 to 41: the rate of its memory.
"""


def accumulate(
    matrix: Matrix, unit: Unit, dot: DotSums, x: Rounded, w: Expr, block: Expr, t: Expr, acc: Expr
) -> None:
    """acc[row] = x'[rows of tile t] · W[block]ᵀ, for some columns of the block at a time."""
    for r in range(dot.rows):
        v.put(acc, [r, 0], v.splat(0.0))
    columns = dot.pieces * unit.lanes
    tile = _Tile(BlockLayout(matrix), unit, dot, x, w, block, t, acc)
    if columns == v.ROWS:
        return tile.columns(v.i32(0))
    with T.serial(0, v.ROWS // columns) as some:
        tile.columns(some * columns)


@dataclass(frozen=True)
class _Tile:
    """The outputs `acc` of a block for the rows of tile `t`."""

    layout: BlockLayout
    unit: Unit
    dot: DotSums
    x: Rounded
    w: Expr
    block: Expr
    t: Expr
    acc: Expr

    def columns(self, column: Expr) -> None:
        """Compute the columns of the block from `column` on."""
        layout, dot, n = self.layout, self.dot, self.unit.lanes
        at = [column + piece * n for piece in range(dot.pieces)]
        each, cells = layout.span // layout.cell, layout.matrix.k // layout.cell

        def some(span: Expr, count: int) -> None:
            if dot.streams and layout.levels:
                _ahead(self.w, (self.block, span), layout.scale_start, layout.scale_lines)
            scales = SpanScales(layout, self.unit, self.w, self.block, span)
            columns = [(first, scales.columns(first, n)) for first in at]
            with T.serial(0, count) as cell:
                for inside in range(layout.cell // layout.matrix.group):
                    self._group(span, cell, inside, columns)
            if dot.streams and not layout.levels:
                _ahead(self.w, (self.block, span), layout.scale_start, layout.scale_lines)

        with T.serial(0, cells // each) as span:
            some(span, each)
        if cells % each:
            some(v.i32(cells // each), cells % each)

    def _group(self, span: Expr, cell: Expr, inside: int, columns: list[tuple[Expr, OfGroup]]) -> None:
        """Add group `inside` of a cell of a span; `columns`: the first column of each register, and its
        scales.
        """
        matrix, dot = self.layout.matrix, self.dot
        step, of_cell = turn(matrix), self.layout.cell // matrix.group
        in_span = T.Bind(cell * of_cell + inside) if of_cell > 1 else cell
        g = T.Bind(span * self.layout.groups + in_span)
        sums, at = groups.begun(dot, self.x, self.t, g), (self.block, span)
        with T.serial(0, matrix.group // step) as c:
            if dot.streams:
                for line, count in lines(self.layout, cell, inside, c):
                    _ahead(self.w, at, line, count)
            codes = [
                dot.codes(
                    groups.words(self.layout, self.unit, self.w, at, cell, inside, c, first),
                    inside * (matrix.group // packing.QUAD),
                )
                for first, _ in columns
            ]
            begin = T.Bind((g * (matrix.group // 2) + c * (step // 2)) * dot.rows)
            dot.add(sums, codes, InputReader(self.unit, self.x.words, self.t, begin))
        found = [(first, *scales(in_span)) for first, scales in columns]
        groups.ended(dot, self.unit, self.x, self.t, g, sums, found, self.acc)


def _ahead(w: Expr, at: tuple[Expr, Expr], line: Expr, count: int) -> None:
    """Prefetch the lines that are AHEAD lines behind some lines of a span; behind a matrix nothing is lost.

    Prefetches must have the order of the lines: in another order, those of Q5_0 made its product slower.
    """
    for i in range(count):
        v.prefetch(w, [*at, line + (i + AHEAD), 0])
