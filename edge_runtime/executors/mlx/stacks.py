"""Products with the matrices of the experts that rows have chosen."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

SORTED = 64
"""Pairs from which sorting them by expert pays off: then MLX reads each expert once (as in mlx-lm)."""


class ExpertPairs:
    """The pairs of a row and one of its experts: row by row, or, if there are many, sorted by expert.

    `experts`: the expert of each pair.
    """

    def __init__(self, chosen: mx.array) -> None:
        """`chosen`: the numbers of each row's experts [..., L, top]."""
        self._top = chosen.shape[-1]
        self.experts, self._back = mx.flatten(chosen), None
        self.sorted = chosen.size >= SORTED
        self._order: mx.array | None = None
        if self.sorted:
            self._order = mx.argsort(self.experts)
            self.experts = self.experts[self._order]

    def rows(self, x: mx.array) -> mx.array:
        """The row of each pair, of rows x [..., L, K]: [pairs, K]."""
        flat = mx.flatten(x, 0, -2)
        if self._order is None:
            return mx.repeat(flat, self._top, axis=0)
        return flat[self._order // self._top]

    def ordered(self, x: mx.array) -> mx.array:
        """The results of the pairs, row by row again."""
        return x if self._order is None else x[mx.argsort(self._order)]


@dataclass(frozen=True)
class Stack:
    """`count` matrices: weight [count, n, K], or codes, with a scale and a bias for each group of a row."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 0

    @property
    def count(self) -> int:
        """The number of matrices."""
        return self.weight.shape[0]

    @property
    def n(self) -> int:
        """The number of rows of a matrix."""
        return self.weight.shape[1]

    def __call__(self, x: mx.array, pairs: ExpertPairs) -> mx.array:
        """Multiply x [pairs, K], each by the matrix of its expert: [pairs, n]."""
        x = mx.expand_dims(x, -2)
        if self.scales is None:
            weight = mx.swapaxes(self.weight, -1, -2)
            y = mx.gather_mm(x, weight, rhs_indices=pairs.experts, sorted_indices=pairs.sorted)
        else:
            y = mx.gather_qmm(
                x, self.weight, self.scales, self.biases, rhs_indices=pairs.experts, transpose=True,
                group_size=self.group_size, bits=self.bits, sorted_indices=pairs.sorted,
            )  # fmt: skip
        return mx.squeeze(y, -2)
