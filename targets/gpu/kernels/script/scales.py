"""How a lane reads scales and biases of groups of four neighbouring columns, whichever way they are stored.

Words of float16 are kept in registers as they are, and become float32 where they are used. Integers and their
factors (targets/gpu/levels.py) become float32 once a group: by `convert`, which a kernel calls between the
loads and the first use.
"""

# mypy: ignore-errors
# TVMScript: what is built here are expressions, and statements of the kernel that is being parsed.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.script.text import local_array
from nearfar.targets.gpu.kernels.script.vectors import (
    WIDTH,
    four_halves,
    high_halves,
    low_halves,
    number_of,
    or_zero,
    scale_buffer,
    spread,
    zero,
)
from nearfar.targets.gpu.levels import HALF, LevelRows


@dataclass(frozen=True)
class GroupRegisters:
    """Registers of some groups: `words` as they were loaded; of integers, `numbers` after `convert`."""

    words: Any
    numbers: Any = None


class GroupScales:
    """Reads the scales of a quantized matrix; of a dense one nothing is declared, loaded or converted.

    `count` groups are held at a time; `i` is the number of one.
    """

    def __init__(self, matrix: Matrix, count: int = 1) -> None:
        self.matrix, self.levels, self.count = matrix, LevelRows.of(matrix), count
        self.biased = matrix.quantized and matrix.scales.offsets
        self.vectors = len(self.levels.planes) + 1 if self.levels else 1
        """Vectors of words of a group: one, or one of each plane of integers, and the factors."""

    def declare(self) -> GroupRegisters:
        """Declare the registers."""
        words = local_array("scale", self.count * self.vectors, scale_buffer(self.matrix)[1])
        if self.levels is None:
            return GroupRegisters(words)
        return GroupRegisters(
            words, local_array("scaling", self.count * self.matrix.scales.values, f"float32x{WIDTH}")
        )

    def load(self, held: GroupRegisters, i: int, w1, group, column) -> None:
        """Load the words of a group of four columns."""
        if not self.matrix.quantized:
            return
        at, levels = i * self.vectors, self.levels
        if levels is None:
            T.buffer_store(held.words, w1[group, column], [at])
            return
        for j, plane in enumerate(levels.planes):
            T.buffer_store(held.words, w1[plane.first + group // plane.groups, column], [at + j])
        row = levels.factors + group // levels.groups // levels.shared
        T.buffer_store(held.words, w1[row, column], [at + len(levels.planes)])

    def drop(self, held: GroupRegisters, i: int, valid) -> None:
        """Make scale and bias of a group 0 unless `valid`; after `convert`."""
        array, count = (held.numbers, self.matrix.scales.values) if self.levels else (held.words, 1)
        for at in range(i * count, (i + 1) * count):
            T.buffer_store(array, or_zero(valid, array[at]), [at])

    def convert(self, held: GroupRegisters, i: int, group) -> None:
        """Make numbers of the integers of a loaded group; `group` as it was loaded."""
        if self.levels is None:
            return
        scales, levels, at = self.matrix.scales, self.levels, i * self.vectors
        factors = held.words[at + len(levels.planes)]
        if not scales.offsets:
            factors = T.shift_right(factors, _all(group // levels.groups % levels.shared * HALF))
        integer = number_of(self._integer(held, at, group, 0), scales.centre)
        T.buffer_store(held.numbers, low_halves(factors) * integer, [i * scales.values])
        if scales.offsets:
            offset = high_halves(factors) * number_of(self._integer(held, at, group, 1))
            T.buffer_store(held.numbers, zero() - offset, [i * 2 + 1])

    def _integer(self, held: GroupRegisters, at: int, group, which: int):
        """The integer of the scale (0) or the offset (1) of a group, uint32x4."""
        found = None
        for j, plane in enumerate(self.levels.planes):
            shift = group % plane.groups * plane.field + which * plane.bits
            part = T.shift_right(held.words[at + j], _all(shift)) & _all((1 << plane.bits) - 1)
            part = T.shift_left(part, _all(plane.low)) if plane.low else part
            found = part if found is None else found | part
        return found

    def scale(self, held: GroupRegisters, i: int):
        """The scales of a group, float32x4."""
        if self.levels:
            return held.numbers[i * self.matrix.scales.values]
        return (low_halves if self.biased else four_halves)(held.words[i])

    def bias(self, held: GroupRegisters, i: int):
        """The biases of a group, float32x4, if the matrix has any."""
        return held.numbers[i * 2 + 1] if self.levels else high_halves(held.words[i])

    def weight(self, held: GroupRegisters, i: int, value):
        """A vector of codes times their scale, plus their bias, if they have one; weights of a dense matrix
        as they are.
        """
        if not self.matrix.quantized:
            return value
        product = self.scale(held, i) * value
        return product + self.bias(held, i) if self.biased else product


def _all(number):
    return spread(T.Cast("uint32", number) if not isinstance(number, int) else T.uint32(number))
