"""A weight matrix as targets see it: its shape and bits, its quantized form, and the arrays it is packed
into.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.format.scales import ALL, CODE_BITS, GROUP_SIZES, PAIRS, TABLES, VALUE_BITS, Scales, matrix_bytes
from nearfar.kernels.codes import pack_codes, unpack_codes

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [n, k] (n outputs, k inputs) as the kernels see it.

    `bits` is one of CODE_BITS for codes in groups of `group` inputs, whose scales are stored as `scales`
    says; 32 or 16 for dense float32/float16. `stack`: the matrix is `stack` matrices [n/stack, k], one below
    the other. `pieces`: matrices with some of the rows each, in order, where the rows are not stored alike;
    `bits` and `group` are then those that could hold all of them.
    """

    n: int
    k: int
    bits: int
    group: int = 0
    stack: int = 1
    scales: Scales = PAIRS
    pieces: tuple[Matrix, ...] = ()

    @staticmethod
    def of(pieces: Sequence[Matrix]) -> Matrix:
        """The matrix with the rows of several matrices of equal width; neighbours that are stored alike are
        one piece.
        """
        joined: list[Matrix] = []
        for piece in pieces:
            if joined and replace(joined[-1], n=piece.n) == piece:
                joined[-1] = replace(piece, n=joined[-1].n + piece.n)
            else:
                joined.append(piece)
        if len(joined) == 1:
            return joined[0]
        n, bits = sum(each.n for each in joined), max(each.bits for each in joined)
        group = min(each.group for each in joined)
        return Matrix(n, joined[0].k, bits, group, pieces=tuple(joined))

    @property
    def each(self) -> Matrix:
        """One of the stacked matrices."""
        return replace(self, n=self.n // self.stack, stack=1)

    @property
    def quantized(self) -> bool:
        """Whether the matrix holds integers with scales."""
        return self.bits in CODE_BITS

    @property
    def value_bits(self) -> int:
        """Bits of the integers that are scaled: codes, or values of a table; of values without scales."""
        return VALUE_BITS if self.scales.table else self.bits

    @property
    def zero(self) -> int:
        """The code that stands for 0, if scales are stored without offsets."""
        return self.scales.zero(self.bits)

    @property
    def bytes(self) -> int:
        """The matrix's size as it is stored, with its scales."""
        if self.pieces:
            return sum(piece.bytes for piece in self.pieces)
        return matrix_bytes(self.n, self.k, self.bits, self.group, self.scales)

    @property
    def label(self) -> str:
        """The matrix in kernels' names, such as `1536x576_q4g64`."""
        if self.pieces:
            return f"{self.n}x{self.k}_" + "_".join(f"{piece.n}{piece.scheme}" for piece in self.pieces)
        return f"{self.n}x{self.k}_{self.scheme}"

    @property
    def scheme(self) -> str:
        """How the matrix is stored, in kernels' names."""
        return f"q{self.bits}g{self.group}{self.scales.label}" if self.quantized else f"f{self.bits}"


@dataclass(frozen=True)
class StorableMatrices:
    """What a target can store: group sizes, ways of storing scales, and whether the rows of a matrix can
    differ (Matrix.pieces).

    `widens`: tensors that are computed together are stored alike where that loses nothing, with the most
    bits of theirs, because pieces take time.
    """

    groups: tuple[int, ...] = GROUP_SIZES
    scales: tuple[Scales, ...] = ALL
    pieces: bool = True
    widens: bool = False

    @staticmethod
    def pairs(groups: tuple[int, ...] = GROUP_SIZES) -> StorableMatrices:
        """What a target can store that has float16 pairs alone."""
        return StorableMatrices(groups, (PAIRS,), pieces=False)

    def apart(self, stored: Iterable[Scales]) -> bool:
        """Whether rows that store their scales in these ways, or in one way with codes of different bits, are
        stored in pieces: scales of two levels have no other way without loss.
        """
        return self.pieces and (not self.widens or any(scales.superblock for scales in stored))

    def holds(self, matrix: Matrix) -> bool:
        """Whether a target that can store this can store a matrix."""
        if matrix.pieces:
            apart = self.apart(piece.scales for piece in matrix.pieces)
            return apart and all(map(self.holds, matrix.pieces))
        return not matrix.quantized or (matrix.group in self.groups and matrix.scales.form in self.scales)


def values_of(codes: npt.NDArray[np.uint8], scales: Scales) -> npt.NDArray[Any]:
    """The numbers that codes stand for before they are scaled: themselves, or a table's values, int8."""
    return codes if scales.table is None else np.array(TABLES[scales.table], np.int8)[codes]


@dataclass(frozen=True)
class QuantTensor:
    """Rows of a quantized matrix: `words` uint32 [n, k*bits/32] (codes.py); `scales` and `biases` [n,
    k/group].

    They are float16 in MLX's form: w = scales · code + biases. If the scheme has a table, its values take the
    place of codes here and below, and biases are zeros. With `units`, float16 [n, k/superblock, 2],
    they are uint8, as format.scales.Scales says: w = (units[0] · scales) · code − units[1] · biases; if the
    scheme has no offsets, w = units[0] · (scales − 2^(bits of a scale − 1)) · (code − zero), and `biases` and
    units[1] are zeros.
    """

    words: npt.NDArray[np.uint32]
    scales: npt.NDArray[Any]
    biases: npt.NDArray[Any]
    bits: int
    units: npt.NDArray[np.float16] | None = None

    @staticmethod
    def of_codes(
        codes: npt.NDArray[np.uint8],
        scales: npt.NDArray[Any],
        biases: npt.NDArray[Any],
        bits: int,
        units: npt.NDArray[np.float16] | None = None,
    ) -> QuantTensor:
        """Pack codes uint8 [n, k] and their scales and biases."""
        return QuantTensor(pack_codes(codes, bits), scales, biases, bits, units)

    @property
    def codes(self) -> npt.NDArray[np.uint8]:
        """The codes, one a byte: uint8 [n, k]."""
        return unpack_codes(self.words, self.bits)

    def widened(self, bits: int, group: int, k: int) -> QuantTensor:
        """These weights with codes of `bits` bits and groups of `group` inputs, value for value; `k`: the
        number of inputs.
        """
        repeat = k // group // self.scales.shape[1]
        words = self.words if bits == self.bits else pack_codes(self.codes, bits)
        scales, biases = (
            a if repeat == 1 else np.repeat(a, repeat, axis=1) for a in (self.scales, self.biases)
        )
        return QuantTensor(words, scales, biases, bits, self.units)

    def __getitem__(self, rows: npt.NDArray[np.int64] | slice) -> QuantTensor:
        """Some of the rows, or all in another order. A group is within one row, so nothing else changes."""
        units = None if self.units is None else self.units[rows]
        return QuantTensor(self.words[rows], self.scales[rows], self.biases[rows], self.bits, units)


@dataclass(frozen=True)
class QuantPieces:
    """The rows of a matrix with `pieces`, piece after piece."""

    pieces: tuple[QuantTensor, ...]

    def __getitem__(self, rows: npt.NDArray[np.int64]) -> QuantPieces:
        """All rows in another order, which leaves each row in its piece."""
        made, first = [], 0
        for piece in self.pieces:
            n = len(piece.words)
            made.append(piece[rows[first : first + n] - first])
            first += n
        return QuantPieces(tuple(made))


@dataclass(frozen=True)
class PackedArray:
    """One packed array of a matrix: the tensor `<param>.<name>` of the weight stream."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes in the weight stream."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
