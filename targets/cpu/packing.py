"""The memory layout of matrices for the CPU kernels: blocks of 16 output rows, each one stream of 64-byte
lines.

A line holds a word of each of the 16 rows, so a vector load gives many rows' weights for the same inputs, the
inputs are broadcast, and every lane sums its own row: no horizontal additions. Rows are padded to whole
blocks with zeros. A group of a block is its lines of codes, then a line of its 16 scales and 16 biases: a
thread reads one stream from end to end.

Codes of 2, 4 and 8 bits fill 32-bit words. Codes of 3, 5 and 6 bits are split into two planes, so that memory
is read at the true number of bits: lines with the low 2, 4 and 4 bits of each code, then lines with the
remaining 1, 1 and 2 bits. (Groups of 16 fill half a line of single bits; the other half is zero.)

One stream serves every vector unit (units.py). Four inputs in order are a *quad*: each has one byte of a
word, so that a shift and a mask give the four bytes that vpdpbusd and sdot take. The low bytes of the word's
two halves are inputs 0 and 2, the high bytes 1 and 3: the pairs of int16 that pmaddwd and similar
instructions take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from nearfar.kernels.bundles import Bundles
from nearfar.kernels.codes import U8, U32, unpack_codes
from nearfar.kernels.quantized import Array, Matrix, Part, QuantTensor
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


PLANES = {
    2: (Plane(2),), 4: (Plane(4),), 8: (Plane(8),),
    3: (Plane(2), Plane(1, 2)), 5: (Plane(4), Plane(1, 4)), 6: (Plane(4), Plane(2, 4)),
}  # fmt: skip


def blocks(n: int) -> int:
    """The number of blocks of ROWS rows that hold n rows."""
    return -(-n // ROWS)


def first_lines(matrix: Matrix) -> list[int]:
    """The lines of a group at which each plane, and then the scales and biases, begin."""
    at = [0]
    for plane in PLANES[matrix.bits]:
        at.append(at[-1] + plane.lines(matrix.group))
    return at


def parts(matrix: Matrix) -> tuple[Part, ...]:
    """The packed arrays of a matrix: `blocks` if it is quantized, otherwise `dense`. Each matrix of a stack
    begins with a block.
    """
    nb, k = matrix.stack * blocks(matrix.each.n), matrix.k
    if not matrix.quantized:
        return (Part("dense", (nb, k, ROWS), "float16" if matrix.bits == 16 else "float32"),)
    return (Part("blocks", (nb, k // matrix.group, first_lines(matrix)[-1] + 1, ROWS), "uint32"),)


def _by_block(array: Array, n: int) -> Array:
    """Rearrange [n, …] to [blocks, …, ROWS], with rows padded by zeros."""
    padded = np.zeros((blocks(n) * ROWS, *array.shape[1:]), array.dtype)
    padded[:n] = array
    return np.moveaxis(padded.reshape(-1, ROWS, *array.shape[1:]), 1, -1)


def _planes(matrix: Matrix, words: U32) -> list[U32]:
    """The planes [rows, groups, lines] of some rows, whose codes are in order in words [rows, k*bits/32]."""
    planes, shape = PLANES[matrix.bits], (len(words), matrix.k // matrix.group)
    if len(planes) == 1:
        return [_in_quads(planes[0], words).reshape(*shape, -1)]
    codes = unpack_codes(words, matrix.bits).reshape(*shape, matrix.group)
    return [_picked(plane, codes) for plane in planes]


def _picked(plane: Plane, codes: U8) -> U32:
    """A plane [rows, groups, lines] picked from codes [rows, groups, group]."""
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


def pack(matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
    """Pack a matrix into the arrays of `parts`."""
    if matrix.stack > 1:
        high = blocks(matrix.each.n) * ROWS * matrix.stack
        return pack(replace(matrix, n=high, stack=1), padded(matrix, tensor, high))
    if not isinstance(tensor, QuantTensor):
        dtype = np.float16 if matrix.bits == 16 else np.float32
        return (np.ascontiguousarray(_by_block(np.asarray(tensor, dtype), matrix.n)),)
    (part,), first = parts(matrix), first_lines(matrix)
    packed = np.empty(part.shape, np.uint32)
    some = max(1, AT_ONCE * 32 // (matrix.k * matrix.bits * ROWS)) * ROWS
    for row in range(0, matrix.n, some):
        rows = min(some, matrix.n - row)
        at = packed[row // ROWS : blocks(row + rows)]
        planes = _planes(matrix, tensor.words[row : row + rows])
        for plane, (begin, end) in zip(planes, pairwise(first), strict=True):
            at[:, :, begin:end] = _by_block(plane, rows)
    affine = np.stack([tensor.scales, tensor.biases], axis=-1)  # [n, groups, 2]
    by_block = np.ascontiguousarray(_by_block(affine.astype(np.float16), matrix.n))
    packed[:, :, -1] = by_block.reshape(*part.shape[:2], 2 * ROWS).view(np.uint32)
    return (packed,)


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
    return QuantTensor(words, scales, biases, tensor.bits)  # type: ignore[arg-type]


def bundles(step: Step, *, rounds: bool) -> Bundles:
    """Empty: the CPU's kernels can read any number of vectors."""
    return {}
