"""A weight matrix as targets see it: its shape and bits, its quantized form, and the arrays it is packed
into.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nearfar.kernels.codes import BITS, pack_codes, unpack_codes

Array = npt.NDArray[np.generic]
GROUPS = (16, 32, 64, 128)
"""Group sizes: numbers of inputs that can share a scale and a bias."""
SCALES_BYTES = 4
"""Bytes of a group's scale and bias."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [n, k] (n outputs, k inputs) as the kernels see it.

    `bits` is one of codes.BITS for the affine layout (MLX: w = scale*q + bias per `group` inputs), 32 or 16
    for dense float32/float16. `stack`: the matrix is so many matrices [n/stack, k], one below the other.
    """

    n: int
    k: int
    bits: int
    group: int = 0
    stack: int = 1

    @property
    def each(self) -> Matrix:
        """One of the stacked matrices."""
        return replace(self, n=self.n // self.stack, stack=1)

    @property
    def quantized(self) -> bool:
        """Whether the matrix holds integers with scales and biases."""
        return self.bits in BITS

    @property
    def bytes(self) -> int:
        """The matrix's size as it is stored, with scales and biases."""
        values = self.n * self.k * self.bits // 8
        return values + self.n * (self.k // self.group) * SCALES_BYTES if self.quantized else values

    @property
    def label(self) -> str:
        """The matrix in kernels' names, such as `1536x576_q4g64`."""
        return f"{self.n}x{self.k}_{self.scheme}"

    @property
    def scheme(self) -> str:
        """How the matrix is stored, in kernels' names."""
        return f"q{self.bits}g{self.group}" if self.quantized else f"f{self.bits}"


@dataclass(frozen=True)
class QuantTensor:
    """Quantized matrix in MLX's form: `words` uint32 [n, k*bits/32] (codes.py); `scales`, `biases` float16
    [n, k/group].
    """

    words: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float16]
    biases: npt.NDArray[np.float16]
    bits: int

    @staticmethod
    def of_codes(
        codes: npt.NDArray[np.uint8],
        scales: npt.NDArray[np.float16],
        biases: npt.NDArray[np.float16],
        bits: int,
    ) -> QuantTensor:
        """Pack codes uint8 [n, k] and their scales and biases."""
        return QuantTensor(pack_codes(codes, bits), scales, biases, bits)

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
        return QuantTensor(words, scales, biases, bits)

    def __getitem__(self, rows: npt.NDArray[np.int64] | slice) -> QuantTensor:
        """Some of the rows, or all in another order. A group is within one row, so nothing else changes."""
        return QuantTensor(self.words[rows], self.scales[rows], self.biases[rows], self.bits)


@dataclass(frozen=True)
class Part:
    """One packed array of a matrix: the tensor `<param>.<name>` of the weight stream."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes in the weight stream."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
