"""Products of many rows: the codes and scales of a span of two blocks are unpacked once, and multiplied by
all rows of a chunk while they lie in the L1 cache.

With registers of 16 lanes a tile of four rows and two blocks reads six vectors for eight products, where
eight rows and one block read nine; and codes of two planes, tables and scales in two levels cost as good as
nothing. On a Zen 5, products of Q6_K and Q3_K take 0.87 to 0.91 of the time of tile after tile, of Q5_0, Q5_K
and IQ4 0.94, of Q4_K 0.97, and of groups with float16 scales the same.

Units that multiply pairs of int16 gain more, since they also make pairs of bytes: a step of 256 rows of a
model in Q5_0, Q6_K and Q4_K takes 0.79 of the time with AVX2, of 64 rows 0.73; WebAssembly's products take
0.7 to 0.85 (an Intel Xeon). Few rows gain nothing: they use the unpacked codes too seldom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.jobs import Linear
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import groups
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import SUMS, DotSums, InputReader, tile, turn
from nearfar.targets.cpu.kernels.epilogue import finish_tile
from nearfar.targets.cpu.kernels.rounded import Rounded
from nearfar.targets.cpu.kernels.scales import SpanScales
from nearfar.targets.cpu.packing import BlockLayout
from nearfar.targets.cpu.units import Unit

Expr = Any
Blocks = tuple[Expr, ...]
LEAST_ROWS = 32
"""Rows from which on unpacking once pays off: with 8 rows a product of Q4_K was 11 % slower, with 16 it was
3 % slower, with 32 it was level.
"""
BLOCKS = 2
WIDE = (4, BLOCKS * v.ROWS)
"""Rows and columns of a tile of 16 registers of sums, 8 of outputs, and two of codes. Other tiles have as
many rows, or a number that divides them.
"""
CHUNK = 256
"""Rows that use a span once it is unpacked: their outputs take 32 KiB, its codes 8. (64: to 5 % slower.)"""
SPAN = 256
"""The most inputs that are unpacked at a time: codes of 8 KiB. Pairs of int16 take half as many inputs."""
QUADS = 2
"""Quads of pairs that a turn of the loop multiplies: with the quads of a whole group (up to 8), LLVM orders
products by registers of columns, and keeps the inputs that these share on the stack.
"""


def tile_of(unit: Unit, rows: int) -> tuple[int, int] | None:
    """Rows and columns of a tile where a product of `rows` rows is computed this way, None elsewhere.

    WIDE is for registers of 16 lanes; units that multiply pairs of int16 take all columns of a block.
    """
    if rows < LEAST_ROWS or rows % WIDE[0]:
        return None
    if unit.dot == "vpdpbusd" and unit.lanes == v.ROWS:
        return WIDE
    return tile(unit, rows, SUMS[unit.dot], (v.ROWS,)) if unit.dot in ("pmaddwd", "dot_i16x8") else None


@dataclass(frozen=True)
class _Unpacked:
    """Codes and scales of some spans of two blocks, in arrays on the stack.

    `pieces`: the number of registers with the columns of both blocks. `codes`: these registers for each word
    of each quad; `factors`: for each group those of its scales, and of its offsets if there are any.
    """

    dot: DotSums
    layout: BlockLayout
    pieces: int
    codes: Expr
    factors: Expr

    @classmethod
    def of(cls, dot: DotSums, layout: BlockLayout, inputs: int) -> _Unpacked:
        """Room for the codes of some inputs: whole groups."""
        lanes, values = dot.unit.lanes, inputs // layout.matrix.group * layout.matrix.scales.values
        pieces = BLOCKS * v.ROWS // lanes
        codes = v.registers(inputs // packing.QUAD * dot.words * pieces, f"int32x{lanes}")
        return cls(dot, layout, pieces, codes, v.registers(values * pieces, f"float32x{lanes}"))

    @property
    def quads(self) -> int:
        """The quads of a group."""
        return self.layout.matrix.group // packing.QUAD

    def fill(
        self, unit: Unit, w: Expr, blocks: Blocks, span: Expr, cells: tuple[Expr, int], to: Expr
    ) -> None:
        """Unpack cells of a span (the first, and their number) as groups `to` and following."""
        layout, matrix = self.layout, self.layout.matrix
        step, of_cell, n = turn(matrix) // packing.QUAD, layout.cell // matrix.group, unit.lanes
        each, values = v.ROWS // n, matrix.scales.values
        with T.serial(0, BLOCKS) as number:
            block = T.Bind(blocks[0] + number * (blocks[1] - blocks[0]))
            of_span = SpanScales(layout, unit, w, block, span)
            with T.serial(0, each) as of_block:
                first, piece = T.Bind(of_block * n), T.Bind(number * each + of_block)
                scales = of_span.columns(first, n)
                with T.serial(0, cells[1]) as i:
                    cell = T.Bind(cells[0] + i)
                    for inside in range(of_cell):
                        in_span, group = T.Bind(cell * of_cell + inside), T.Bind(i * of_cell + (to + inside))
                        with T.serial(0, self.quads // step) as c:
                            held = groups.words(layout, unit, w, (block, span), cell, inside, c, first)
                            for quad, code in enumerate(self.dot.codes(held, inside * self.quads)):
                                for which, word in enumerate(code):
                                    at = self._code(group, c * step + quad, which, piece)
                                    v.put1(self.codes, [at], word)
                        for which, factor in enumerate(scales(in_span)[:values]):
                            v.put1(self.factors, [self._factor(group, piece, which)], factor)

    def _code(self, group: Expr, quad: Expr, word: int, piece: Expr) -> Expr:
        return ((group * self.quads + quad) * self.dot.words + word) * self.pieces + piece

    def code(self, group: Expr, quad: Expr, piece: Expr) -> list[Expr]:
        """The words of a quad of a group in a register of columns."""
        return [T.Bind(self.codes[self._code(group, quad, i, piece)]) for i in range(self.dot.words)]

    def columns(self, group: Expr, first: Expr) -> list[tuple[Expr, Expr, Expr | None]]:
        """A group's scales and offsets in each register of a tile, after its first column in the tile;
        `first`: the tile's first register.
        """
        values = self.layout.matrix.scales.values
        found = [
            [T.Bind(self.factors[self._factor(group, first + piece, which)]) for which in range(values)]
            for piece in range(self.dot.pieces)
        ]
        return [
            (v.i32(piece * self.dot.unit.lanes), each[0], each[1] if values > 1 else None)
            for piece, each in enumerate(found)
        ]

    def _factor(self, group: Expr, piece: Expr, which: int) -> Expr:
        return (group * self.pieces + piece) * self.layout.matrix.scales.values + which


def panels(job: Linear, unit: Unit, dot: DotSums, x: Rounded, buf: dict[str, Expr]) -> None:
    """A parallel loop over pairs of blocks: two neighbours, or a block of gates and the block of factors."""
    layout, count = BlockLayout(job.matrix), packing.blocks(job.columns)
    tiles, most = job.m // dot.rows, CHUNK // dot.rows
    pairs = count if job.gate is not None else -(-count // BLOCKS)
    with v.parallel(pairs) as pair:
        if job.gate is not None:
            blocks = (pair, T.Bind(pair + count))
        else:
            blocks = (T.Bind(pair * BLOCKS), T.Bind(tirx.min(pair * BLOCKS + 1, v.i32(count - 1))))
        outputs = v.registers(most * dot.rows * BLOCKS)
        with T.serial(0, (tiles + (most - 1)) // most) as chunk:
            first = T.Bind(chunk * most)
            some = _Chunk(job, unit, dot, x, outputs, first, T.Bind(tirx.min(tiles - first, v.i32(most))))
            some.compute(layout, buf["w"], blocks)
            some.store(buf, blocks, count)


@dataclass(frozen=True)
class _Chunk:
    """`count` tiles of rows from tile `first` on, whose outputs are `outputs` [tile, row, block]."""

    job: Linear
    unit: Unit
    dot: DotSums
    x: Rounded
    outputs: Expr
    first: Expr
    count: Expr

    def _at(self, tile: Expr, row: int, block: Any) -> Expr:
        return (tile * self.dot.rows + row) * BLOCKS + block

    def compute(self, layout: BlockLayout, w: Expr, blocks: Blocks) -> None:
        """Add the products of all spans to zeros."""
        with T.serial(0, self.count * (self.dot.rows * BLOCKS)) as i:
            v.put1(self.outputs, [i], v.splat(0.0))
        cells, each = layout.matrix.k // layout.cell, layout.span // layout.cell
        whole, at_once = cells // each, max(1, SPAN // self.dot.words // layout.cell)
        spans = max(n for n in range(1, max(1, at_once // each) + 1) if whole % n == 0)
        part = max(n for n in range(1, min(each, at_once) + 1) if each % n == 0)
        of_cell = layout.cell // layout.matrix.group
        held = _Unpacked.of(self.dot, layout, spans * part * layout.cell)
        with T.serial(0, whole // spans) as turns, T.serial(0, each // part) as parts:
            begin = T.Bind(parts * part)
            with T.serial(0, spans) as i:
                held.fill(self.unit, w, blocks, T.Bind(turns * spans + i), (begin, part), i * layout.groups)
            self._add(held, (turns * (spans * each) + begin) * of_cell, spans * part * of_cell)
        if rest := cells % each:
            held.fill(self.unit, w, blocks, v.i32(whole), (v.i32(0), rest), v.i32(0))
            self._add(held, v.i32(whole * each * of_cell), rest * of_cell)

    def _add(self, held: _Unpacked, begin: Expr, count: int) -> None:
        """Add the products of `count` unpacked groups, of which the first is group `begin` of the row."""
        runs = held.pieces // self.dot.pieces
        with T.serial(0, runs) as run, T.serial(0, self.count) as tile:
            self._add_tile(held, begin, count, tile, run)

    def _add_tile(self, held: _Unpacked, begin: Expr, count: int, tile: Expr, run: Expr) -> None:
        """Add the products of a tile: of run `run` of the columns of both blocks."""
        dot, matrix = self.dot, held.layout.matrix
        blocks, first = dot.pieces * self.unit.lanes // v.ROWS, T.Bind(run * dot.pieces)
        step = QUADS if dot.words > 1 else turn(matrix) // packing.QUAD
        places = [
            (row, block, self._at(tile, row, run * blocks + block))
            for row in range(dot.rows)
            for block in range(blocks)
        ]
        t = T.Bind(self.first + tile)
        acc = v.local((dot.rows, blocks * v.ROWS), "float32")
        for row, block, at in places:
            v.put(acc, [row, block * v.ROWS], self.outputs[at])
        with T.serial(0, count) as group:
            g = T.Bind(begin + group)
            sums = groups.begun(dot, self.x, t, g)
            with T.serial(0, held.quads // step) as c:
                codes = [
                    [held.code(group, c * step + quad, first + piece) for quad in range(step)]
                    for piece in range(dot.pieces)
                ]
                at = T.Bind((g * (matrix.group // 2) + c * (step * 2)) * dot.rows)
                dot.add(sums, codes, InputReader(self.unit, self.x.words, t, at))
            groups.ended(dot, self.unit, self.x, t, g, sums, held.columns(group, first), acc)
        for row, block, at in places:
            v.put1(self.outputs, [at], v.lanes(acc, [row, block * v.ROWS]))

    def store(self, buf: dict[str, Expr], blocks: Blocks, count: int) -> None:
        """Store the outputs of both blocks; a last block without a neighbour is stored once."""
        job, rows = self.job, self.dot.rows
        with T.serial(0, self.count) as tile:
            row = T.Bind((self.first + tile) * rows)
            each = [v.local((rows, v.ROWS), "float32") for _ in blocks]
            for piece, acc in enumerate(each):
                for r in range(rows):
                    v.put(acc, [r, 0], self.outputs[self._at(tile, r, piece)])
            if job.gate is not None:
                return finish_tile(job, buf, blocks[0], row, rows, *each)
            finish_tile(job, buf, blocks[0], row, rows, each[0], None)
            with T.If(blocks[0] + 1 < count), T.Then():
                finish_tile(job, buf, blocks[1], row, rows, each[1], None)
        return None
