"""The rows of a step as MLX computes them: without padding, with consecutive positions as one span."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.executors.mlx.turns import Turn, turns
from nearfar.format.sizes import pages_for

Array = npt.NDArray[Any]

MAX_RUNS = 16
"""The most ranges of cells that are joined one by one; with more, whole pages are gathered.

Measured on a CPU with 512 positions: 32 ranges cost 0.13 ms, a gather 0.34 ms, but each range costs the host
1 µs a layer.
"""


@dataclass(frozen=True)
class Reach:
    """The part of the cache that a span attends to: cells by position, and the mask of the span's rows."""

    runs: tuple[tuple[int, int], ...]
    """Half-open ranges of cells; empty if `pages` are gathered instead."""
    pages: mx.array | None
    skip: int
    """Cells of the first gathered page that are not attended to."""
    count: int
    mask: str | mx.array | None
    """The mask of scaled_dot_product_attention: None, "causal" or booleans [rows, count]."""


@dataclass(frozen=True)
class Span:
    """Consecutive rows at consecutive positions of one sequence."""

    row: int
    count: int
    start: int
    reach: dict[int | None, Reach]
    """The reach for each window; None is the window of layers that see every position."""


@dataclass(frozen=True)
class View:
    """How the layers of a group of caches look at positions.

    `windows`: of attention; `exact`: make every mask an array of booleans (there is no causal kernel for
    quantized caches). `taps`: of convolutions. `stride`: positions of a column of states; None: no states.
    """

    windows: tuple[int | None, ...] = ()
    exact: bool = False
    taps: tuple[int, ...] = ()
    stride: int | None = None


@dataclass(frozen=True)
class Taps:
    """The cells that each row's convolution reads, int32 [rows, taps], and which of them are at position 0
    or later; None: all.
    """

    cells: mx.array
    there: mx.array | None


@dataclass(frozen=True)
class LiveRows:
    """The live rows of a step. A cell is a token's place in the cache: page · page_size + offset."""

    live: Array
    """Indices of the live rows in the step, int [n]."""
    positions: Array
    cells: slice | mx.array
    """The cells of the rows' keys and values: a slice, or an index for each row."""
    spans: tuple[Span, ...]
    taps: dict[int, Taps]
    """The cells of convolutions, by their number of taps."""
    turns: tuple[Turn, ...]
    """The rows in the order in which a group of states takes them."""
    last_page: int

    def __len__(self) -> int:
        return len(self.live)


def lay_out(positions: Array, slots: Array, page_table: Array, page_size: int, view: View) -> LiveRows:
    """Lay out a step from its `positions` [M], `slots` [M] and a `page_table`; −1 marks a padding row."""
    live = np.flatnonzero(positions >= 0)
    at, slot = positions[live].astype(np.int64), slots[live].astype(np.int64)
    column = page_table[slot, at // (view.stride or page_size)].astype(np.int64)
    if view.stride is not None:
        order = turns(at, slot, page_table, view.stride)
        return LiveRows(live, at, slice(0, 0), (), {}, order, int(column.max()))
    cells = column * page_size + at % page_size
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(slot) != 0)) + 1
    edges = [0, *breaks.tolist(), len(live)]
    spans = []
    for row, end in itertools.pairwise(edges):
        start, count = int(at[row]), end - row
        pages = page_table[slot[row], : pages_for(start + count, page_size)]
        reach = {
            window: _reach(start, count, pages, page_size, window, view.exact) for window in view.windows
        }
        spans.append(Span(row, count, start, reach))
    together = len(cells) == 1 or bool((np.diff(cells) == 1).all())
    where = slice(int(cells[0]), int(cells[-1]) + 1) if together else mx.array(cells.astype(np.int32))
    taps = {count: _taps(at, slot, page_table, page_size, count) for count in view.taps}
    return LiveRows(live, at, where, tuple(spans), taps, (), int(column.max()))


def _taps(at: Array, slot: Array, page_table: Array, size: int, taps: int) -> Taps:
    positions = at[:, None] - np.arange(taps - 1, -1, -1)
    there, first = positions >= 0, np.maximum(positions, 0)
    cells = page_table[slot[:, None], first // size].astype(np.int64) * size + first % size
    every = bool(there.all())
    return Taps(
        mx.array(np.where(there, cells, 0).astype(np.int32)), None if every else mx.array(there[..., None])
    )


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
    """The mask of a span; None if every row sees every cell of the reach."""
    if count == 1:
        return None
    if not exact and (window is None or start + count <= window):
        return "causal"
    rows, columns = np.arange(start, start + count)[:, None], np.arange(first, start + count)
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    return mx.array(seen)
