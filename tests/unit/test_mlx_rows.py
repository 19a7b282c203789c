"""The layout of a step for MLX: the cells that each row writes and attends to, for any pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx.core", reason="needs MLX (pip install 'nearfar[mlx]')")

from nearfar.edge_runtime.executors.mlx.rows import MAX_RUNS, LiveRows, Reach, View, lay_out

SIZE, SLOTS, PER_SLOT = 4, 3, 24


def cells_of(reach: Reach) -> list[int]:
    """The cells of a reach, in order."""
    if reach.pages is None:
        return [cell for start, end in reach.runs for cell in range(start, end)]
    pages: Any = np.array(reach.pages)
    cells = (pages[:, None] * SIZE + np.arange(SIZE)).ravel()
    return list(cells[reach.skip : reach.skip + reach.count].tolist())


def seen(reach: Reach, rows: int) -> list[set[int]]:
    """The cells that each row of a span sees."""
    cells = cells_of(reach)
    assert len(cells) == reach.count
    if reach.mask is None:
        assert rows == 1
        return [set(cells)]
    mask = (
        np.tri(rows, reach.count, reach.count - rows, dtype=bool)
        if reach.mask == "causal"
        else np.array(reach.mask)
    )
    return [{cell for cell, on in zip(cells, row, strict=True) if on} for row in mask]


def check(
    rows: LiveRows, positions: list[int], slots: list[int], table: Any, windows: list[int | None]
) -> None:
    live = [m for m, position in enumerate(positions) if position >= 0]
    assert rows.live.tolist() == live
    where = [int(table[slots[m], positions[m] // SIZE]) * SIZE + positions[m] % SIZE for m in live]
    written = (
        list(range(rows.cells.start, rows.cells.stop))
        if isinstance(rows.cells, slice)
        else rows.cells.tolist()
    )
    assert written == where
    assert rows.last_page == max(where) // SIZE
    assert sum(span.count for span in rows.spans) == len(live)
    for span in rows.spans:
        for window in windows:
            for row, found in enumerate(seen(span.reach[window], span.count)):
                m = live[span.row + row]
                first = 0 if window is None else max(0, positions[m] - window + 1)
                expected = range(first, positions[m] + 1)
                assert found == {int(table[slots[m], p // SIZE]) * SIZE + p % SIZE for p in expected}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_row_sees_its_own_sequence_up_to_itself(data: st.DataObject) -> None:
    pages = data.draw(st.permutations(range(SLOTS * PER_SLOT)) | st.just(list(range(SLOTS * PER_SLOT))))
    table = np.array(pages, np.int32).reshape(SLOTS, PER_SLOT)
    positions: list[int] = []
    slots: list[int] = []
    for slot in data.draw(st.permutations(range(SLOTS))):
        start, count = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 30))
        positions += [*range(start, start + count), *([-1] if data.draw(st.booleans()) else [])]
        slots += [slot] * (len(positions) - len(slots))
    if not any(position >= 0 for position in positions):
        return
    windows = (None, data.draw(st.integers(1, 70)))
    view = View(windows, data.draw(st.booleans()))
    rows = lay_out(np.array(positions, np.int32), np.array(slots, np.int32), table, SIZE, view)
    check(rows, positions, slots, table, windows)


def test_scattered_pages_are_gathered_and_consecutive_ones_are_not() -> None:
    table = np.stack([np.arange(PER_SLOT), np.arange(PER_SLOT) * 2 + PER_SLOT]).astype(np.int32)
    positions, slots = np.array([90, 90], np.int32), np.array([0, 1], np.int32)
    first, second = lay_out(positions, slots, table, SIZE, View((None,))).spans
    assert first.reach[None].runs == ((0, 91),)
    assert second.reach[None].pages is not None
    assert len(np.array(second.reach[None].pages)) > MAX_RUNS
