"""State for turning a model's list into calls of MLX: weights, values, and common steps of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import mlx.core as mx

from nearfar.edge_runtime.executors.mlx.calls import ArrayRef, Arrays, Calls, Value, whole
from nearfar.edge_runtime.executors.mlx.elementwise import Binary, Elementwise
from nearfar.edge_runtime.executors.mlx.stacks import Stack
from nearfar.step.shapes import CacheShape

Product = Callable[[mx.array], Arrays]
"""The product of x [..., K] with a matrix."""


class MatrixWeights(Protocol):
    """A weight matrix [N, K]."""

    @property
    def k(self) -> int: ...

    @property
    def widths(self) -> Sequence[int]:
        """Columns of each array that a call returns: N in all."""
        ...

    def __call__(self, x: mx.array) -> Arrays:
        """Multiply with x [..., K]."""
        ...

    def rows(self, index: mx.array) -> mx.array:
        """Rows of the matrix as floats, in the shape of `index` followed by K."""
        ...


class StepWeights(Protocol):
    """The parameters of the step, by their names."""

    def matrix(self, name: str) -> MatrixWeights: ...

    def stack(self, name: str) -> Stack:
        """The matrices of experts, one below the other."""
        ...

    def vector(self, name: str, dtype: mx.Dtype) -> Arrays:
        """A vector, in parts that are concatenated."""
        ...


class StepReading:
    """The calls so far, the value of each operation so far, and (`do`) arithmetic in the program's dtypes."""

    def __init__(self, caches: Sequence[CacheShape], weights: StepWeights, arithmetic: Elementwise) -> None:
        self.caches, self.weights, self.do = caches, weights, arithmetic
        self.calls = Calls()
        self.values: dict[str, Value] = {}

    def whole(self, name: str) -> ArrayRef:
        """Make a value one array, for all operations from here on."""
        part = self.calls.whole(self.values[name])
        self.values[name] = (part,)
        return part

    def narrow(self, part: ArrayRef) -> ArrayRef:
        """Convert a part for products: float16 in a float16 program."""
        narrow = self.do.narrow
        return part if narrow is None else self.calls.each((part,), lambda x, run: narrow(x))[0]

    def wide(self, part: ArrayRef) -> ArrayRef:
        """Convert a part for norms: float32."""
        wide = self.do.wide
        return part if wide is None else self.calls.each((part,), lambda x, run: wide(x))[0]

    def both(self, function: Binary, a: ArrayRef, b: ArrayRef) -> Value:
        """Call a function of two arrays; the result is as wide as the first one."""
        first, second = a.at, b.at
        return self.calls.add(lambda made, run: (function(made[first], made[second]),), a.width)

    def product(self, weight: str, bias: str | None) -> tuple[Product, Sequence[int]]:
        """The product with a matrix and its bias, and the widths of the resulting arrays."""
        matrix = self.weights.matrix(weight)
        if bias is None:
            return matrix, matrix.widths
        parts = self.weights.vector(bias, self.do.dtype)
        if len(parts) != len(matrix.widths):
            parts = [*mx.split(whole(parts), list(accumulate(matrix.widths))[:-1])]
        added = parts
        return lambda x: [y + more for y, more in zip(matrix(x), added, strict=True)], matrix.widths
