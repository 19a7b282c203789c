"""The rows of a step as recurrent states take them: each sequence in order, equally many rows together."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Turn:
    """Consecutive rows of B sequences, as many of each, within one column of states."""

    rows: Array
    """Numbers of the rows among the live ones, [B, T]."""
    before: tuple[int, ...]
    """The page with the state before the rows of each sequence; -1: the state is 0."""
    pages: tuple[int, ...]
    """The page that keeps the state behind them."""

    def take(self, x: mx.array) -> mx.array:
        """Select the rows of x [heads, rows, …] as [heads, B, T, …]."""
        first, count = int(self.rows[0, 0]), self.rows.size
        if int(self.rows[-1, -1]) - first + 1 == count and bool((np.diff(self.rows.ravel()) == 1).all()):
            return mx.unflatten(x[:, first : first + count], 1, self.rows.shape)
        return x[:, mx.array(self.rows.astype(np.int32))]


def turns(positions: Array, slots: Array, page_table: Array, stride: int) -> tuple[Turn, ...]:
    """The turns of live rows, in order. `stride`: positions of a column, which has one page."""
    starts = (np.diff(positions) != 1) | (np.diff(slots) != 0) | (positions[1:] % stride == 0)
    edges = [0, *(np.flatnonzero(starts) + 1).tolist(), len(positions)]
    rounds, alike = Counter[int](), dict[tuple[int, int], list[int]]()
    for row, end in itertools.pairwise(edges):
        slot = int(slots[row])
        alike.setdefault((rounds[slot], end - row), []).append(row)
        rounds[slot] += 1
    return tuple(
        _turn(np.array(rows), count, positions, slots, page_table, stride)
        for (_, count), rows in sorted(alike.items())
    )


def _turn(rows: Array, count: int, positions: Array, slots: Array, page_table: Array, stride: int) -> Turn:
    slot, at = slots[rows], positions[rows]
    before = np.where(at == 0, -1, page_table[slot, np.maximum(at - 1, 0) // stride])
    pages = page_table[slot, at // stride]
    return Turn(rows[:, None] + np.arange(count), tuple(before.tolist()), tuple(pages.tolist()))
