"""What is known of the inputs of experts: an expert sees only the tokens that choose it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from nearfar.build.calibration.arithmetic import Array
from nearfar.build.weights.quantize import F32
from nearfar.build.weights.second_order import F64
from nearfar.step.params import Param

LEAST = 32
"""Tokens that must have chosen an expert before its inputs are weighed: a mean of fewer squares would weigh
them by what happens to be in the text.
"""


@dataclass(frozen=True)
class RowShare:
    """Rows [first, last) of a tensor, which are quantized together. `importance`: the importances of their
    inputs; None: all alike. `weight`: the weight of each input's errors in a loss.
    """

    first: int
    last: int
    importance: F32 | None
    weight: F32


Shares = Callable[[str], Iterable[RowShare]]
"""Gives the rows of a tensor, by its name, with what is known of their inputs."""


def whole(param: Param, importance: F32 | None) -> Shares:
    """The rows of each tensor of a matrix, all of which have the same inputs."""
    weight = np.ones(param.k, np.float32) if importance is None else importance
    return lambda name: (RowShare(0, param.tensors[name], importance, weight),)


@dataclass
class Chosen:
    """The sums of the squares of each expert's inputs, and the number of tokens, by the name of the stack."""

    sums: dict[tuple[str, int], F64] = field(default_factory=dict)
    counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, stack: str, expert: int, x: Array) -> None:
        """Add the inputs [rows, k] of one expert of a stack of matrices."""
        key, found = (stack, expert), np.einsum("mk,mk->k", x, x).astype(np.float64)
        self.sums[key] = self.sums[key] + found if key in self.sums else found
        self.counts[key] = self.counts.get(key, 0) + len(x)

    def importance(self, stack: str, expert: int) -> F32 | None:
        """The mean of the squares of an expert's inputs [k]; None where too few tokens have chosen it."""
        count = self.counts.get((stack, expert), 0)
        if count < LEAST:
            return None
        return np.asarray(self.sums[stack, expert] / count, np.float32)

    def shares(self, param: Param, tensor: str) -> Iterator[RowShare]:
        """The experts that have rows of a tensor of a stack, with what is known of their inputs."""
        total = sum(n for (name, _), n in self.counts.items() if name == param.name)
        for expert, first, last in shares(param, tensor):
            found = self.sums.get((param.name, expert))
            weight = np.zeros(param.k) if found is None else found / total
            yield RowShare(first, last, self.importance(param.name, expert), np.asarray(weight, np.float32))


def shares(param: Param, tensor: str) -> Iterator[tuple[int, int, int]]:
    """The experts that have rows of a tensor of a stack of matrices, each with its first row there and the
    row behind its last.
    """
    rows, count = param.tensors[tensor], param.piece(tensor).stack
    if count:
        each = rows // count
        yield from ((expert, expert * each, (expert + 1) * each) for expert in range(count))
        return
    before = 0
    for name, n in param.tensors.items():
        if name == tensor:
            break
        before += n
    yield before // (param.n // param.stack), 0, rows
