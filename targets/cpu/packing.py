"""How matrices lie in memory for the CPU kernels: blocks of 16 output rows, interleaved.

A block's inner axis is the 16 rows, so one vector load gives 8 rows' weights for the same inputs, the inputs
are broadcast, and every lane sums its own row: no horizontal additions. Rows are padded to whole blocks with
zeros.

Codes of 2, 4 and 8 bits fill 32-bit words. Those of 3, 5 and 6 bits lie in two planes, so that memory is read
at the true number of bits: the low 2, 4 and 4 bits of each code in one array, the 1, 1 and 2 bits above in
another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nearfar.step.model import Step
from nearfar.targets.bundles import Bundles
from nearfar.targets.quantized import Array, Matrix, Part, QuantTensor

ROWS = 16


@dataclass(frozen=True)
class Plane:
    """Some bits of every code: `bits` of them, the lowest of which is bit `low` of the code."""

    name: str
    bits: int
    low: int = 0

    @property
    def per_word(self) -> int:
        """Codes in one 32-bit word."""
        return 32 // self.bits

    @property
    def mask(self) -> int:
        """Ones in so many bits."""
        return (1 << self.bits) - 1

    def place(self, i: int) -> int:
        """Bit of a word at which its code i begins.

        Input 2j of a word sits in its low half, input 2j+1 in its high half, both at bit j·bits: a shift and
        a mask give a pair of int16 for the multiply-add of 16-bit pairs.
        """
        return (i // 2) * self.bits + (i % 2) * 16


PLANES = {
    2: (Plane("codes", 2),), 4: (Plane("codes", 4),), 8: (Plane("codes", 8),),
    3: (Plane("codes", 2), Plane("high", 1, 2)),
    5: (Plane("codes", 4), Plane("high", 1, 4)),
    6: (Plane("codes", 4), Plane("high", 2, 4)),
}  # fmt: skip


def blocks(n: int) -> int:
    """Blocks of ROWS rows that hold n rows."""
    return -(-n // ROWS)


def step(matrix: Matrix) -> int:
    """Inputs that the kernels take at a time: whole words of every plane, or a group where that is less."""
    return min(matrix.group, max(plane.per_word for plane in PLANES[matrix.bits]))


def first_word(matrix: Matrix, plane: Plane, g: Any, c: Any) -> tuple[Any, Any]:
    """Where turn c of group g begins in a plane: a word of a row, and bits to move it down.

    g and c are numbers or expressions; a turn is `step` inputs.
    """
    if plane.per_word > step(
        matrix
    ):  # a word of single bits holds two groups of 16: eight bits of each half are the second's
        return g // 2, g % 2 * 8
    return g * (matrix.group // plane.per_word) + c * (step(matrix) // plane.per_word), 0


def parts(matrix: Matrix) -> tuple[Part, ...]:
    """Quantized: the words of each plane, then `affine` (scale, then bias, of each group); dense: `dense`."""
    nb, k = blocks(matrix.n), matrix.k
    if not matrix.quantized:
        return (Part("dense", (nb, k, ROWS), "float16" if matrix.bits == 16 else "float32"),)
    words = [Part(plane.name, (nb, k // plane.per_word, ROWS), "uint32") for plane in PLANES[matrix.bits]]
    return (*words, Part("affine", (nb, k // matrix.group, 2, ROWS), "float16"))


def _by_block(array: Array, n: int) -> Array:
    """[n, c] to [blocks, c, ROWS], rows padded with zeros."""
    padded = np.zeros((blocks(n) * ROWS, array.shape[1]), array.dtype)
    padded[:n] = array
    return np.ascontiguousarray(padded.reshape(-1, ROWS, array.shape[1]).transpose(0, 2, 1))


def pack(matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
    """Pack a matrix into its parts (see `parts`)."""
    if not isinstance(tensor, QuantTensor):
        dtype = np.float16 if matrix.bits == 16 else np.float32
        return (_by_block(np.asarray(tensor, dtype), matrix.n),)
    codes, planes = tensor.codes, []
    for plane in PLANES[matrix.bits]:
        words = np.zeros((matrix.n, matrix.k // plane.per_word), np.uint32)
        for i in range(plane.per_word):
            code = (codes[:, i :: plane.per_word] >> np.uint8(plane.low)) & np.uint8(plane.mask)
            words |= code.astype(np.uint32) << np.uint32(plane.place(i))
        planes.append(_by_block(words, matrix.n))
    affine = np.stack([_by_block(tensor.scales, matrix.n), _by_block(tensor.biases, matrix.n)], axis=2)
    return *planes, np.ascontiguousarray(affine.astype(np.float16))


def bundles(step: Step) -> Bundles:
    """None: a kernel takes as many vectors as it needs."""
    return {}
