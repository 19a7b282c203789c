"""The array `levels` of a matrix whose groups have integer scales, which float16 factors of a superblock
multiply (format/scales.py): its layout on GPU targets.

The array is k-major like the codes: uint32 [rows, n], a word for each column, so that four columns are one
load of 16 bytes. Integers of 6 bits are split into two planes like codes, the low bits first, so that the
integers of a group lie in one word of each plane. A group's field has its scale in the low bits and its
offset, if there is one, above it. All rows of the low bits come first, then those of the high bits, then the
float16 factors: of scale and offset in the halves of a word, one row a superblock; or, without offsets, of
two successive superblocks, the last with 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nearfar.kernels.codes import pack_codes
from nearfar.kernels.quantized import Matrix, QuantTensor

WORD, HALF = 32, 16
"""Bits of a word and of a float16."""
SPLIT: dict[int, tuple[int, ...]] = {4: (4,), 6: (4, 2), 8: (8,)}
"""Bits of the planes of integer scales, the low ones first."""


@dataclass(frozen=True)
class LevelPlane:
    """`bits` bits of every integer, from bit `low` of it on; the plane begins at row `first`. A group's field
    has `field` bits: those of its scale and offset.
    """

    bits: int
    low: int
    first: int
    field: int

    @property
    def groups(self) -> int:
        """The number of groups whose fields are in a word."""
        return WORD // self.field


@dataclass(frozen=True)
class LevelRows:
    """Where the integers and the factors of a matrix lie: factors begin at row `factors` of `rows`, and those
    of `shared` superblocks share a word.
    """

    planes: tuple[LevelPlane, ...]
    factors: int
    rows: int
    groups: int
    """The number of groups of a superblock."""
    shared: int

    @staticmethod
    def of(matrix: Matrix) -> LevelRows | None:
        """The layout of a matrix's integer scales; None where it has none."""
        scales = matrix.scales
        if not matrix.quantized or not scales.superblock:
            return None
        planes, low, first = [], 0, 0
        for bits in SPLIT[scales.bits]:
            planes.append(LevelPlane(bits, low, first, bits * scales.values))
            low, first = low + bits, first - -(matrix.k // matrix.group) // planes[-1].groups
        shared = 1 if scales.offsets else 2
        rows = first - -(matrix.k // scales.superblock) // shared
        return LevelRows(tuple(planes), first, rows, scales.superblock // matrix.group, shared)


def _packed(plane: LevelPlane, integers: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint32]:
    """A plane of scales, or of scales and offsets, each uint8 [n, groups]: uint32 [n, words], filled with
    zeros.
    """
    picked = [each >> np.uint8(plane.low) & np.uint8((1 << plane.bits) - 1) for each in integers]
    fields = np.pad(np.stack(picked, axis=-1), ((0, 0), (0, -picked[0].shape[1] % plane.groups), (0, 0)))
    return pack_codes(fields.reshape(len(fields), -1), plane.bits)


def pack_levels(matrix: Matrix, tensor: QuantTensor) -> npt.NDArray[np.uint32]:
    """Pack the integers and factors of a matrix: uint32 [rows, n]."""
    levels, offsets = LevelRows.of(matrix), matrix.scales.offsets
    assert levels is not None
    assert tensor.units is not None
    integers = [tensor.scales, tensor.biases] if offsets else [tensor.scales]
    packed = [_packed(plane, integers) for plane in levels.planes]
    units = tensor.units if offsets else tensor.units[..., 0]
    halves = np.zeros((len(units), (levels.rows - levels.factors) * 2), np.float16)
    halves[:, : units[0].size] = units.reshape(len(units), -1)
    return np.ascontiguousarray(np.concatenate([*packed, halves.view("<u4")], axis=1).T)
