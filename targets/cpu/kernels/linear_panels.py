"""Products of many rows: the codes and scales of a span of two blocks are unpacked once, and multiplied by
all rows of a chunk while they lie in the L1 cache.

A tile of four rows and two blocks reads six vectors for eight products, where eight rows and one block read
nine; and codes of two planes, tables and scales in two levels cost as good as nothing. On a Zen 5, products
of Q6_K and Q3_K take 0.87 to 0.91 of the time of tile after tile, of Q5_0, Q5_K and IQ4 0.94, of Q4_K 0.97,
and of groups with float16 scales the same. Few rows gain nothing: they use the unpacked codes too seldom.
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
from nearfar.targets.cpu.kernels.dot import DotSums, InputReader, turn
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
TILE = (4, BLOCKS * v.ROWS)
"""Rows and columns of a tile: 16 registers of sums, 8 of outputs, and two of codes."""
CHUNK = 256
"""Rows that use a span once it is unpacked: their outputs take 32 KiB, its codes 8. (64: to 5 % slower.)"""
SPAN = 256
"""The most inputs that are unpacked at a time: codes of 8 KiB."""


def suit(unit: Unit, rows: int) -> bool:
    """Whether a product of `rows` rows is computed this way."""
    return unit.dot == "vpdpbusd" and unit.lanes == v.ROWS and rows >= LEAST_ROWS


@dataclass(frozen=True)
class _Unpacked:
    """Codes and scales of some spans of two blocks, in arrays on the stack.

    `codes`: a register for each quad of each block; `factors`: for each group and block its scales, and its
    offsets if there are any.
    """

    dot: DotSums
    layout: BlockLayout
    codes: Expr
    factors: Expr

    @classmethod
    def of(cls, dot: DotSums, layout: BlockLayout, inputs: int) -> _Unpacked:
        """Room for the codes of some inputs: whole groups."""
        quads = inputs // packing.QUAD
        each = inputs // layout.matrix.group * layout.matrix.scales.values
        return cls(dot, layout, v.registers(quads * BLOCKS, v.I32X16), v.registers(each * BLOCKS))

    @property
    def quads(self) -> int:
        """The quads of a group."""
        return self.layout.matrix.group // packing.QUAD

    def fill(
        self, unit: Unit, w: Expr, blocks: Blocks, span: Expr, cells: tuple[Expr, int], to: Expr
    ) -> None:
        """Unpack cells of a span (the first, and their number) as groups `to` and following."""
        layout, matrix = self.layout, self.layout.matrix
        step, of_cell = turn(matrix) // packing.QUAD, layout.cell // matrix.group
        for piece, block in enumerate(blocks):
            scales = SpanScales(layout, unit, w, block, span).columns(v.i32(0), v.ROWS)
            with T.serial(0, cells[1]) as i:
                cell = T.Bind(cells[0] + i)
                for inside in range(of_cell):
                    in_span, group = T.Bind(cell * of_cell + inside), T.Bind(i * of_cell + (to + inside))
                    with T.serial(0, self.quads // step) as c:
                        held = groups.words(layout, unit, w, (block, span), cell, inside, c, v.i32(0))
                        for quad, code in enumerate(self.dot.codes(held, inside * self.quads)):
                            at = group * self.quads + c * step + quad
                            v.put1(self.codes, [at * BLOCKS + piece], code)
                    for which, factor in enumerate(scales(in_span)[: matrix.scales.values]):
                        v.put1(self.factors, [self._factor(group, piece, which)], factor)

    def code(self, group: Expr, quad: Expr, piece: int) -> Expr:
        """The codes of a quad of a group of a block."""
        return T.Bind(self.codes[(group * self.quads + quad) * BLOCKS + piece])

    def columns(self, group: Expr) -> list[tuple[Expr, Expr, Expr | None]]:
        """A group's scales and offsets in each block, after the block's first column in a tile."""
        values = self.layout.matrix.scales.values
        found = [
            [T.Bind(self.factors[self._factor(group, piece, which)]) for which in range(values)]
            for piece in range(BLOCKS)
        ]
        return [
            (v.i32(piece * v.ROWS), each[0], each[1] if values > 1 else None)
            for piece, each in enumerate(found)
        ]

    def _factor(self, group: Expr, piece: int, which: int) -> Expr:
        return (group * BLOCKS + piece) * self.layout.matrix.scales.values + which


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

    def _at(self, tile: Expr, row: int, piece: int) -> Expr:
        return (tile * self.dot.rows + row) * BLOCKS + piece

    def compute(self, layout: BlockLayout, w: Expr, blocks: Blocks) -> None:
        """Add the products of all spans to zeros."""
        with T.serial(0, self.count * (self.dot.rows * BLOCKS)) as i:
            v.put1(self.outputs, [i], v.splat(0.0))
        cells, each = layout.matrix.k // layout.cell, layout.span // layout.cell
        whole, at_once = cells // each, max(1, SPAN // layout.cell)
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
        matrix, dot = held.layout.matrix, self.dot
        step = turn(matrix) // packing.QUAD
        with T.serial(0, self.count) as tile:
            t = T.Bind(self.first + tile)
            acc = v.local((dot.rows, BLOCKS * v.ROWS), "float32")
            for row in range(dot.rows):
                for piece in range(BLOCKS):
                    v.put(acc, [row, piece * v.ROWS], self.outputs[self._at(tile, row, piece)])
            with T.serial(0, count) as group:
                g = T.Bind(begin + group)
                sums = groups.begun(dot, self.x, t, g)
                with T.serial(0, held.quads // step) as c:
                    codes = [
                        [held.code(group, c * step + quad, piece) for quad in range(step)]
                        for piece in range(BLOCKS)
                    ]
                    at = T.Bind((g * (matrix.group // 2) + c * (step * 2)) * dot.rows)
                    dot.add(sums, codes, InputReader(self.unit, self.x.words, t, at))
                groups.ended(dot, self.unit, self.x, t, g, sums, held.columns(group), acc)
            for row in range(dot.rows):
                for piece in range(BLOCKS):
                    v.put1(self.outputs, [self._at(tile, row, piece)], v.lanes(acc, [row, piece * v.ROWS]))

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
