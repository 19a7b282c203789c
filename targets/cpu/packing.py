"""How matrices lie in memory for the CPU kernels: blocks of 16 output rows, one stream of 64-byte lines each.

A line holds a word of each of the 16 rows, so a vector load gives many rows' weights for the same inputs, the
inputs are broadcast, and every lane sums its own row: no horizontal additions. Rows are padded to whole
blocks with zeros. A group of a block is its lines of codes, then a line of its 16 scales and 16 biases: a
thread reads one stream from end to end.

Codes of 2, 4 and 8 bits fill 32-bit words. Those of 3, 5 and 6 bits lie in two planes, so that memory is read
at the true number of bits: lines with the low 2, 4 and 4 bits of each code, then lines with the 1, 1 and 2
bits above. (Groups of 16 fill half a line of single bits; the other half is zero.)

One stream serves every vector unit (units.py). Four inputs in order are a *quad*: a byte of a word each, so
that a shift and a mask give the four bytes that vpdpbusd and sdot take; and in the low bytes of its two
halves are inputs 0 and 2, in the high bytes 1 and 3, the pairs of int16 that pmaddwd and its like take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nearfar.step.model import Step
from nearfar.targets.bundles import Bundles
from nearfar.targets.quantized import Array, Matrix, Part, QuantTensor

ROWS = 16
QUAD = 4
"""Inputs that share a word's shift: one in each byte."""


@dataclass(frozen=True)
class Plane:
    """Some bits of every code: `bits` of them, the lowest of which is bit `low` of the code."""

    bits: int
    low: int = 0

    @property
    def quads(self) -> int:
        """Quads in one 32-bit word."""
        return 8 // self.bits

    @property
    def mask(self) -> int:
        """Ones in so many bits."""
        return (1 << self.bits) - 1

    def place(self, i: int) -> int:
        """Bit of a word at which its code i begins."""
        return i % QUAD * 8 + i // QUAD * self.bits

    def lines(self, group: int) -> int:
        """Lines that hold a group of a block."""
        return -(-group // (QUAD * self.quads))


PLANES = {
    2: (Plane(2),), 4: (Plane(4),), 8: (Plane(8),),
    3: (Plane(2), Plane(1, 2)), 5: (Plane(4), Plane(1, 4)), 6: (Plane(4), Plane(2, 4)),
}  # fmt: skip


def blocks(n: int) -> int:
    """Blocks of ROWS rows that hold n rows."""
    return -(-n // ROWS)


def first_lines(matrix: Matrix) -> list[int]:
    """The line of a group at which each plane begins, and that of the scales and biases."""
    at = [0]
    for plane in PLANES[matrix.bits]:
        at.append(at[-1] + plane.lines(matrix.group))
    return at


def parts(matrix: Matrix) -> tuple[Part, ...]:
    """Quantized: the `blocks`; dense: `dense`."""
    nb, k = blocks(matrix.n), matrix.k
    if not matrix.quantized:
        return (Part("dense", (nb, k, ROWS), "float16" if matrix.bits == 16 else "float32"),)
    return (Part("blocks", (nb, k // matrix.group, first_lines(matrix)[-1] + 1, ROWS), "uint32"),)


def _by_block(array: Array, n: int) -> Array:
    """[n, …] to [blocks, …, ROWS], rows padded with zeros."""
    padded = np.zeros((blocks(n) * ROWS, *array.shape[1:]), array.dtype)
    padded[:n] = array
    return np.moveaxis(padded.reshape(-1, ROWS, *array.shape[1:]), 1, -1)


def pack(matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
    """Pack a matrix into its parts (see `parts`)."""
    if not isinstance(tensor, QuantTensor):
        dtype = np.float16 if matrix.bits == 16 else np.float32
        return (np.ascontiguousarray(_by_block(np.asarray(tensor, dtype), matrix.n)),)
    (part,), first = parts(matrix), first_lines(matrix)
    packed = np.empty(part.shape, np.uint32)
    codes = tensor.codes.reshape(matrix.n, -1, matrix.group)
    for plane, begin, end in zip(PLANES[matrix.bits], first, first[1:], strict=False):
        words = np.zeros((matrix.n, codes.shape[1], end - begin), np.uint32)
        for i in range(QUAD * plane.quads):
            code = (codes[:, :, i :: QUAD * plane.quads] >> np.uint8(plane.low)) & np.uint8(plane.mask)
            words[:, :, : code.shape[2]] |= code.astype(np.uint32) << np.uint32(plane.place(i))
        packed[:, :, begin:end] = _by_block(words, matrix.n)
    affine = np.stack([tensor.scales, tensor.biases], axis=-1)  # [n, groups, 2]
    by_block = np.ascontiguousarray(_by_block(affine.astype(np.float16), matrix.n))
    packed[:, :, -1] = by_block.reshape(*part.shape[:2], 2 * ROWS).view(np.uint32)
    return (packed,)


def bundles(step: Step) -> Bundles:
    """None: a kernel takes as many vectors as it needs."""
    return {}
