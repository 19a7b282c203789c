"""How a thread reads a column of a stack of matrices: it decodes units of words, and multiplies them with
rows of inputs.

Matrices are stored with the outputs of all experts side by side (packing.py), so an expert is a range of
columns.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.linear.layout import (
    Units,
    dense_element,
    scale_and_bias,
    scale_shape,
    word_shape,
)

THREADS = 32
"""Threads of a workgroup, which have neighbouring columns."""


@dataclass(frozen=True)
class Column:
    """How a thread reads a column: `groups` of `steps` units each; of dense matrices one group."""

    matrix: Matrix
    units: Units

    @classmethod
    def of(cls, matrix: Matrix) -> Column:
        """The column of a matrix."""
        return cls(matrix, Units.of(matrix))

    @property
    def groups(self) -> int:
        """Groups that share a scale and a bias."""
        return self.matrix.k // self.matrix.group if self.matrix.quantized else 1

    @property
    def steps(self) -> int:
        """Units of a group."""
        return self.units.count // self.groups

    @property
    def ragged(self) -> bool:
        """Whether the last unit has values beyond the inputs."""
        return self.matrix.k % self.units.inputs != 0

    @property
    def shapes(self):
        """Shapes and dtype of the codes or values, and of the scales."""
        return (*word_shape(self.matrix), scale_shape(self.matrix))

    def value(self, word, e):
        """Code or value `e` of a unit."""
        if not self.matrix.quantized:
            return dense_element(word[0], self.matrix.bits, e)
        return self.units.code(word, 0, e)

    def input(self, x, row, at):
        """Input `at` of a row, zero beyond the last."""
        if not self.ragged:
            return x[row, at]
        return T.Select(at < self.matrix.k, x[row, T.min(at, self.matrix.k - 1)], T.float32(0))

    def add(self, acc, first, scale, word, at, x, rows, w0, w1) -> None:
        """Add the products of rows of x, at most as many as the array `rows` names, and the column at[2] to
        acc[first], acc[first + 1] and so on (statements): each weight is decoded once.

        Registers: `scale` has a group's scale and bias, and a weight; `word` a unit's words; at[3] the unit.
        """
        units, column = self.units, at[2]
        with T.serial(self.groups) as g:
            if self.matrix.quantized:
                factor, bias = scale_and_bias(self.matrix, w1, g, column)
                T.buffer_store(scale, factor, [0])
                T.buffer_store(scale, bias, [1])
            with T.serial(self.steps) as j:
                T.buffer_store(at, g * self.steps + j, [3])
                with T.unroll(units.words) as v:
                    T.buffer_store(word, units.load(w0, at[3], v, column), [v])
                with T.unroll(units.inputs) as e:
                    value = self.value(word, e)
                    T.buffer_store(
                        scale, value * scale[0] + scale[1] if self.matrix.quantized else value, [2]
                    )
                    for i in range(int(rows.shape[0])):
                        product = scale[2] * self.input(x, rows[i], at[3] * units.inputs + e)
                        T.buffer_store(acc, acc[first + i] + product, [first + i])
