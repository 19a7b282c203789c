"""The memory layout of matrices for the CPU kernels: blocks of 16 output rows, each one stream of 64-byte
lines.

A line holds a word of each of the 16 rows, so a vector load gives many rows' weights for the same inputs, the
inputs are broadcast, and every lane sums its own row: no horizontal additions. Rows are padded to whole
blocks with zeros. A *span* of a block has lines of codes and lines of their scales: a thread reads one
stream from end to end. A span is a group, followed by a line of 16 scales and 16 biases; or two groups,
followed by a line of 16 scales of each; or lines of integer scales and offsets and a line of their 16 and 16
float16 factors, followed by the groups of a superblock (BlockLayout); lines of integers and of factors are
counted in halves, of which the next part takes the second. A last span of one group has zeros in place of the
second.

Codes of 2, 4 and 8 bits fill 32-bit words. Codes of 3, 5 and 6 bits are split into two planes, so that memory
is read at the true number of bits: lines with the low 2, 4 and 4 bits of each code, then lines with the
remaining 1, 1 and 2 bits. Within a span this holds for each *cell*: a group, or in a superblock as many
groups as fill a line of each plane. (Other groups of 16 fill half a line of single bits; the other half is
zero.)

One stream serves every vector unit (units.py). Four inputs in order are a *quad*: each has one byte of a
word, so that a shift and a mask give the four bytes that vpdpbusd and sdot take. The low bytes of the word's
two halves are inputs 0 and 2, the high bytes 1 and 3: the pairs of int16 that pmaddwd and similar
instructions take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from nearfar.kernels.bundles import Bundles
from nearfar.kernels.codes import U8, U32, unpack_codes
from nearfar.kernels.quantized import Array, Matrix, PackedArray, QuantPieces, QuantTensor
from nearfar.step.model import Step

ROWS = 16
QUAD = 4
"""Inputs that share a word's shift, one in each byte."""
AT_ONCE = 1 << 16
"""Words packed at a time: intermediate results stay in a processor's cache."""


@dataclass(frozen=True)
class Plane:
    """`bits` bits of every code; the lowest of them is bit `low` of the code."""

    bits: int
    low: int = 0

    @property
    def quads(self) -> int:
        """The number of quads in a 32-bit word."""
        return 8 // self.bits

    @property
    def mask(self) -> int:
        """A mask of `bits` ones."""
        return (1 << self.bits) - 1

    def place(self, i: int) -> int:
        """The bit of a word at which its code i begins."""
        return i % QUAD * 8 + i // QUAD * self.bits

    def lines(self, group: int) -> int:
        """The number of lines that hold a group of a block."""
        return -(-group // (QUAD * self.quads))


WORD, BYTE = 32, 8
PLANES = {
    2: (Plane(2),), 4: (Plane(4),), 8: (Plane(8),),
    3: (Plane(2), Plane(1, 2)), 5: (Plane(4), Plane(1, 4)), 6: (Plane(4), Plane(2, 4)),
}  # fmt: skip

LEVELS = {4: (Plane(4),), 6: (Plane(4), Plane(2, 4)), 8: (Plane(8),)}
"""The planes of integer scales and offsets, by their bits.

All scales of a span, then all its offsets are a table of bytes, one for each row. A plane has `bits` bits of
each byte: the lowest bits of the bytes of the plane's first line belong to the table's first line, the next
ones to the second. A plane of an odd number of half lines has the table's half lines in this order instead.
"""
HALVES = 2
"""Halves of a line."""
HALF_LINE = ROWS // HALVES
"""Words of half a line, which holds a float16 of each row."""


def blocks(n: int) -> int:
    """The number of blocks of ROWS rows that hold n rows."""
    return -(-n // ROWS)


@dataclass(frozen=True)
class BlockLayout:
    """The order of the lines of a block of a quantized matrix; sizes are numbers of inputs, `lines` of
    lines.
    """

    matrix: Matrix

    @property
    def span(self) -> int:
        """The inputs whose codes and scales are neighbours."""
        scales, group = self.matrix.scales, self.matrix.group
        return scales.superblock or (group if scales.offsets else 2 * group)

    @property
    def cell(self) -> int:
        """The inputs whose lines of all planes are neighbours."""
        quads = max(plane.quads for plane in self.planes)
        return max(self.matrix.group, QUAD * quads) if self.matrix.scales.superblock else self.matrix.group

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of the codes."""
        return PLANES[self.matrix.bits]

    @property
    def groups(self) -> int:
        """The groups of a span."""
        return self.span // self.matrix.group

    @property
    def spans(self) -> int:
        """The spans of a row; the last one may be half full."""
        return -(-self.matrix.k // self.span)

    @property
    def starts(self) -> list[int]:
        """The lines of a cell at which each plane begins, and the number of the cell's lines."""
        at = [0]
        for plane in self.planes:
            at.append(at[-1] + plane.lines(self.cell))
        return at

    @property
    def levels(self) -> tuple[Plane, ...]:
        """The planes of integer scales and offsets; none where these are float16."""
        return LEVELS[self.matrix.scales.bits] if self.matrix.scales.superblock else ()

    @property
    def codes(self) -> int:
        """The line of a span at which its first cell begins."""
        return self.scale_lines if self.levels else 0

    @property
    def code_lines(self) -> int:
        """The lines of a span that hold codes."""
        return self.span // self.cell * self.starts[-1]

    @property
    def scale_start(self) -> int:
        """The line of a span at which its scales begin."""
        return 0 if self.levels else self.code_lines

    @property
    def level_starts(self) -> list[int]:
        """The half lines of a span's scales at which each plane of integers begins, and then the float16
        values.
        """
        at = [0]
        for plane in self.levels:
            at.append(at[-1] + self.level_halves(plane))
        return at

    def level_halves(self, plane: Plane) -> int:
        """The half lines of a plane of integers; the last may be filled up with zeros."""
        return -(-self.table_halves * plane.bits // BYTE)

    def level_run(self, plane: Plane) -> int:
        """The half lines of the table of integers whose bits in a plane are neighbours."""
        return HALVES - self.level_halves(plane) % HALVES

    @property
    def halves(self) -> int:
        """The half lines of a span with float16 values."""
        return self.matrix.scales.values if self.levels else HALVES

    @property
    def values(self) -> int:
        """The number of scales and offsets of a span."""
        return self.groups * self.matrix.scales.values

    @property
    def table_halves(self) -> int:
        """The half lines of the table of a span's integers, a byte each."""
        return -(-self.values // (QUAD // HALVES))

    @property
    def scale_lines(self) -> int:
        """The lines of a span that hold scales, integers or float16."""
        return -(-(self.level_starts[-1] + self.halves) // HALVES)

    @property
    def lines(self) -> int:
        """The lines of a span."""
        return self.code_lines + self.scale_lines


def parts(matrix: Matrix) -> tuple[PackedArray, ...]:
    """The packed arrays of a matrix: `blocks` if it is quantized, otherwise `dense`; those of its pieces,
    `<part>.<piece>`, if it has any. Each matrix of a stack begins with a block.
    """
    if matrix.pieces:
        return tuple(
            replace(part, name=f"{part.name}.{index}")
            for index, piece in enumerate(matrix.pieces)
            for part in parts(piece)
        )
    nb, k = matrix.stack * blocks(matrix.each.n), matrix.k
    if not matrix.quantized:
        return (PackedArray("dense", (nb, k, ROWS), "float16" if matrix.bits == 16 else "float32"),)
    layout = BlockLayout(matrix)
    return (PackedArray("blocks", (nb, layout.spans, layout.lines, ROWS), "uint32"),)


def _by_block(array: Array, n: int) -> Array:
    """Rearrange [n, …] to [blocks, …, ROWS], with rows padded by zeros."""
    padded = np.zeros((blocks(n) * ROWS, *array.shape[1:]), array.dtype)
    padded[:n] = array
    return np.moveaxis(padded.reshape(-1, ROWS, *array.shape[1:]), 1, -1)


def _planes(layout: BlockLayout, words: U32) -> list[U32]:
    """The planes [rows, cells, lines] of some rows, whose codes are in order in words [rows, k*bits/32]."""
    shape = (len(words), layout.matrix.k // layout.cell)
    if len(layout.planes) == 1:
        return [_in_quads(layout.planes[0], words).reshape(*shape, -1)]
    codes = unpack_codes(words, layout.matrix.bits).reshape(*shape, layout.cell)
    return [_picked(plane, codes) for plane in layout.planes]


def _picked(plane: Plane, codes: U8) -> U32:
    """A plane [rows, cells, lines] picked from codes [rows, cells, cell]."""
    made = np.zeros((*codes.shape[:2], plane.lines(codes.shape[2])), np.uint32)
    for i in range(QUAD * plane.quads):
        code = (codes[:, :, i :: QUAD * plane.quads] >> np.uint8(plane.low)) & np.uint8(plane.mask)
        made[:, :, : code.shape[2]] |= code.astype(np.uint32) << np.uint32(plane.place(i))
    return made


def _in_quads(plane: Plane, words: U32) -> U32:
    """Words with the same codes in a plane's order: codes that move equally far move together.

    Moving code by code, a matrix at a time, took four to ten times as long: 3.4 of 34 CPU seconds of a build
    of the 1B shape.
    """
    moves: dict[int, int] = {}
    for i in range(QUAD * plane.quads):
        by = plane.place(i) - plane.bits * i
        moves[by] = moves.get(by, 0) | plane.mask << plane.bits * i
    made, moved = np.zeros_like(words), np.empty_like(words)
    for by, mask in moves.items():
        np.bitwise_and(words, np.uint32(mask), out=moved)
        (np.left_shift if by > 0 else np.right_shift)(moved, np.uint32(abs(by)), out=moved)
        np.bitwise_or(made, moved, out=made)
    return made


def pack(matrix: Matrix, tensor: QuantTensor | QuantPieces | Array) -> tuple[Array, ...]:
    """Pack a matrix into the arrays of `parts`."""
    if isinstance(tensor, QuantPieces):
        pairs = zip(matrix.pieces, tensor.pieces, strict=True)
        return tuple(array for piece, rows in pairs for array in pack(piece, rows))
    if matrix.stack > 1:
        high = blocks(matrix.each.n) * ROWS * matrix.stack
        return pack(replace(matrix, n=high, stack=1), padded(matrix, tensor, high))
    if not isinstance(tensor, QuantTensor):
        dtype = np.float16 if matrix.bits == 16 else np.float32
        return (np.ascontiguousarray(_by_block(np.asarray(tensor, dtype), matrix.n)),)
    (part,), layout = parts(matrix), BlockLayout(matrix)
    packed = np.zeros(part.shape, np.uint32)
    some = max(1, AT_ONCE * 32 // (matrix.k * matrix.bits * ROWS)) * ROWS
    for row in range(0, matrix.n, some):
        rows = min(some, matrix.n - row)
        at = packed[row // ROWS : blocks(row + rows)]
        planes = _planes(layout, tensor.words[row : row + rows])
        for plane, (begin, end) in zip(planes, pairwise(layout.starts), strict=True):
            _put(at[:, :, layout.codes :], plane, begin, end - begin, layout.starts[-1])
        lines = at[:, :, layout.scale_start : layout.scale_start + layout.scale_lines]
        for start, values in _scales(layout, tensor[row : row + rows]):
            for i in range(values.shape[2]):
                line, half = divmod(start + i, HALVES)
                lines[:, :, line, half * HALF_LINE : (half + 1) * HALF_LINE] = values[:, :, i]
    return (packed,)


def _put(packed: U32, plane: U32, begin: int, lines: int, cell: int) -> None:
    """Put a plane [rows, cells, lines] into the blocks of these rows; the cells of a span are `cell` lines
    apart, and the plane begins at line `begin` of a cell.
    """
    rows, cells, _ = plane.shape
    by_block, each = _by_block(plane, rows), -(-cells // packed.shape[1])
    for j in range(each):
        some = by_block[:, j::each]
        packed[:, : some.shape[1], j * cell + begin : j * cell + begin + lines] = some


def _scales(layout: BlockLayout, tensor: QuantTensor) -> Iterator[tuple[int, U32]]:
    """The scales and offsets of some rows: the first half line of a span's, and [blocks, spans, half lines,
    HALF_LINE].
    """
    n, last = len(tensor.scales), layout.level_starts[-1]
    if tensor.units is None:
        stored = np.stack([tensor.scales, tensor.biases][: layout.matrix.scales.values], -1)
        return (yield last, _halves(layout, stored.reshape(n, -1)))
    units = tensor.units[..., : layout.matrix.scales.values]
    yield last, _halves(layout, units.reshape(n, -1))
    values = [tensor.scales, tensor.biases][: layout.matrix.scales.values]
    codes = np.concatenate([each.reshape(n, layout.spans, -1) for each in values], -1)
    table = np.ascontiguousarray(_by_block(codes, n), np.uint8).view(np.uint32)
    shape = table.shape[:2]
    table = table.reshape(*shape, -1)
    for plane, start in zip(layout.levels, layout.level_starts, strict=False):
        run = BYTE // plane.bits
        whole = layout.level_halves(plane) * run * HALF_LINE
        filled = np.pad(table, ((0, 0), (0, 0), (0, whole - table.shape[2])))
        part = (filled >> np.uint32(plane.low)) & np.uint32(plane.mask * 0x01010101)
        shifts = np.arange(run, dtype=np.uint32)[:, None] * np.uint32(plane.bits)
        words = part.reshape(*shape, -1, run, layout.level_run(plane) * HALF_LINE)
        yield start, np.bitwise_or.reduce(words << shifts, axis=3).reshape(*shape, -1, HALF_LINE)


def _halves(layout: BlockLayout, values: Array) -> U32:
    """Float16 values [rows, those of all spans] as half lines [blocks, spans, layout.halves, HALF_LINE]: one
    of each row in each; zeros where a last span has only one of two.
    """
    n, spans = len(values), layout.spans
    padded = np.zeros((n, spans, layout.halves), np.float16)
    padded.reshape(n, -1)[:, : values.shape[1]] = values
    return np.ascontiguousarray(_by_block(padded, n)).view(np.uint32)


def padded(matrix: Matrix, tensor: QuantTensor | Array, high: int) -> QuantTensor | Array:
    """A stack of matrices, each padded by rows of zeros so that all have `high` rows."""
    if high == matrix.n:
        return tensor

    def one(array: Array) -> Array:
        made = np.zeros((matrix.stack, high // matrix.stack, *array.shape[1:]), array.dtype)
        made[:, : matrix.each.n] = array.reshape(matrix.stack, matrix.each.n, *array.shape[1:])
        return made.reshape(high, *array.shape[1:])

    if not isinstance(tensor, QuantTensor):
        return one(tensor)
    words, scales, biases = (one(array) for array in (tensor.words, tensor.scales, tensor.biases))
    units = None if tensor.units is None else one(tensor.units)
    return QuantTensor(words, scales, biases, tensor.bits, units)  # type: ignore[arg-type]


def bundles(step: Step, *, rounds_keys: bool) -> Bundles:
    """Empty: the CPU's kernels can read any number of vectors."""
    return {}
