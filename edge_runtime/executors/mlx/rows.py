"""The rows of a step as MLX computes them: without padding, consecutive positions taken together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from nearfar.format.sizes import pages_for

Array = npt.NDArray[Any]

MAX_RUNS = 16
"""Stretches of the cache that are joined one by one; above, whole pages are gathered. Measured on a CPU, 512
positions: 32 stretches cost 0.13 ms, a gather 0.34 ms, but each stretch costs the host 1 µs a layer."""


@dataclass(frozen=True)
class Reach:
    """The part of the cache that a span attends to: cells by position, and who of the span sees which."""

    runs: tuple[tuple[int, int], ...]
    """Half-open ranges of cells; empty if `pages` are gathered instead."""
    pages: mx.array | None
    skip: int
    """Cells of the first gathered page that are not attended to."""
    count: int
    mask: str | mx.array | None
    """What scaled_dot_product_attention takes: None, "causal" or booleans [rows, count]."""


@dataclass(frozen=True)
class Span:
    """Consecutive rows that are consecutive positions of one sequence."""

    row: int
    count: int
    start: int
    reach: dict[int | None, Reach]
    """By window: None where a layer sees every position."""


@dataclass(frozen=True)
class Rows:
    """The live rows of a step. A cell is a token's place in the cache: page · page_size + offset."""

    live: Array
    """Which of the step's rows they are, int [n]."""
    positions: Array
    cells: slice | mx.array
    """Where the rows' keys and values go: one stretch, or an index a row."""
    spans: tuple[Span, ...]
    last_cell: int

    def __len__(self) -> int:
        return len(self.live)


def lay_out(
    positions: Array,
    slots: Array,
    page_table: Array,
    page_size: int,
    windows: Sequence[int | None],
    exact: bool,
) -> Rows:
    """Lay out a step from its `positions` [M], `slots` [M] and a `page_table`; −1 marks a padding row.

    `exact`: give every mask as booleans (quantized caches have no causal kernel).
    """
    live = np.flatnonzero(positions >= 0)
    at, slot = positions[live].astype(np.int64), slots[live].astype(np.int64)
    cells = page_table[slot, at // page_size].astype(np.int64) * page_size + at % page_size
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(slot) != 0)) + 1
    edges = [0, *breaks.tolist(), len(live)]
    spans = []
    for row, end in itertools.pairwise(edges):
        start, count = int(at[row]), end - row
        pages = page_table[slot[row], : pages_for(start + count, page_size)]
        reach = {window: _reach(start, count, pages, page_size, window, exact) for window in windows}
        spans.append(Span(row, count, start, reach))
    together = len(cells) == 1 or bool((np.diff(cells) == 1).all())
    where = slice(int(cells[0]), int(cells[-1]) + 1) if together else mx.array(cells.astype(np.int32))
    return Rows(live, at, where, tuple(spans), int(cells.max()))


def _reach(start: int, count: int, pages: Array, size: int, window: int | None, exact: bool) -> Reach:
    end = start + count
    first = 0 if window is None else max(0, start - window + 1)
    mask = _mask(start, count, first, window, exact)
    skip, used = first % size, pages[first // size :]
    cuts = np.flatnonzero(np.diff(used) != 1) + 1
    if len(cuts) >= MAX_RUNS:
        return Reach((), mx.array(used.astype(np.int32)), skip, end - first, mask)
    runs = [(int(part[0]) * size, (int(part[-1]) + 1) * size) for part in np.split(used, cuts)]
    runs[0] = (runs[0][0] + skip, runs[0][1])
    runs[-1] = (runs[-1][0], runs[-1][1] - (-end % size))
    return Reach(tuple(runs), None, 0, end - first, mask)


def _mask(start: int, count: int, first: int, window: int | None, exact: bool) -> str | mx.array | None:
    """None where every row sees every cell of the reach."""
    if count == 1:
        return None
    if not exact and (window is None or start + count <= window):
        return "causal"
    rows, columns = np.arange(start, start + count)[:, None], np.arange(first, start + count)
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    return mx.array(seen)
