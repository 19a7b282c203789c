"""The list of calls of a step on MLX: cuts and joins are decided when the list is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="needs MLX (pip install 'nearfar[mlx]')")

from nearfar.edge_runtime.executors.mlx.calls import Calls, Made, Value  # noqa: E402


class Slices:
    """The only part of a run that cuts need."""

    def columns(self, x: Any, start: int, end: int) -> Any:
        """See calls.Run."""
        return x[:, start:end]


def start(widths: list[int]) -> tuple[Calls, Value, Any]:
    """A list with one value in parts of these widths, and the value as one array [2, sum of widths]."""
    calls, x = Calls(), np.arange(2 * sum(widths)).reshape(2, -1)
    parts = mx.split(mx.array(x), np.cumsum(widths)[:-1].tolist(), axis=1)
    return calls, calls.add(lambda made, run: parts, *widths), x


def play(calls: Calls) -> Made:
    """Run the calls; gives the results of the step."""
    made: Made = []
    for call in calls.all:
        made += call(made, Slices())  # type: ignore[arg-type]
    return made


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_cut_has_its_columns_and_cuts_the_parts_at_its_ends_only(widths: list[int], data: Any) -> None:
    calls, value, x = start(widths)
    first = data.draw(st.integers(0, sum(widths) - 1))
    count = data.draw(st.integers(1, sum(widths) - first))
    found = calls.cut(value, first, count)
    edges = np.cumsum([0, *widths])
    split = {int(np.searchsorted(edges, end, "right")) for end in (first, first + count) if end not in edges}
    assert len(calls.all) - 1 == len(split)
    made = play(calls)
    assert [made[part.at].shape[1] for part in found] == [part.width for part in found]
    cut = np.concatenate([np.array(made[part.at]) for part in found], 1)
    np.testing.assert_array_equal(cut, x[:, first : first + count])


def test_one_part_is_whole_and_several_are_joined_by_one_call() -> None:
    calls, value, x = start([3, 1, 2])
    assert calls.whole(value[:1]) is value[0]
    assert len(calls.all) == 1
    joined = calls.whole(value)
    assert (len(calls.all), joined.width) == (2, 6)
    np.testing.assert_array_equal(np.array(play(calls)[joined.at]), x)
