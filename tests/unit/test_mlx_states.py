"""Recurrent states on MLX: rules in chunks of rows, and the order in which rows change states."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("mlx.core", reason="needs MLX (pip install 'nearfar[mlx]')")

import mlx.core as mx

from nearfar.edge_runtime.executors.mlx.delta import Gated, gated_delta
from nearfar.edge_runtime.executors.mlx.recurrence import CHUNK
from nearfar.edge_runtime.executors.mlx.ssm import StateSpace, state_space
from nearfar.edge_runtime.executors.mlx.turns import turns

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 6, 12, 20
TURNS = ((False, True), (True, False))
"""Whether keys are alike, and whether heads of values are tiled over those of keys."""
Array = npt.NDArray[Any]


@pytest.mark.parametrize(
    ("rows", "alike", "tiled"),
    [(1, False, True), (5, True, False), (CHUNK, False, False), *((2 * CHUNK + 7, *each) for each in TURNS)],
)
def test_chunks_are_rows_one_by_one(rows: int, alike: bool, tiled: bool) -> None:
    """With equal keys, rates near 1 and hardly any decay, inverses by powers would lose all digits."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM))
    gates = rng.normal(size=(rows, 2 * HEADS))
    if alike:
        x[:, : 2 * KEY_HEADS * KEY_DIM] = x[0, : 2 * KEY_HEADS * KEY_DIM]
        gates += np.repeat([-8.0, 8.0], HEADS)
    a_log, dt_bias = rng.normal(size=HEADS), rng.normal(size=HEADS)
    state = rng.normal(size=(HEADS, 1, KEY_DIM, VALUE_DIM))
    rule = Gated(KEY_HEADS, HEADS, KEY_DIM, 1e-6, tiled)
    parts = rule.parts(*(mx.array(each.astype(np.float32)) for each in (x, gates, a_log, dt_bias)))
    out, after = gated_delta(mx.array(state.astype(np.float32)), [part[:, None] for part in parts])
    expected, last = one_by_one(x, gates, a_log, dt_bias, state[:, 0], tiled)
    np.testing.assert_allclose(np.array(out)[:, 0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(after)[:, 0], last, rtol=1e-4, atol=1e-4)


def one_by_one(
    x: Array, gates: Array, a_log: Array, dt_bias: Array, state: Array, tiled: bool
) -> tuple[Array, Array]:
    """Outputs [heads, rows, value_dim] and the last state, in float64 (nearfar.step.ops.Delta)."""
    keys, each, out = KEY_HEADS * KEY_DIM, HEADS // KEY_HEADS, np.zeros((HEADS, len(x), VALUE_DIM))
    for row, (line, gate) in enumerate(zip(x, gates, strict=True)):
        for head in range(HEADS):
            first = (head % KEY_HEADS if tiled else head // each) * KEY_DIM
            q, k = (
                part / np.sqrt((part**2).sum() + 1e-6)
                for part in (line[first : first + KEY_DIM], line[keys + first : keys + first + KEY_DIM])
            )
            v = line[2 * keys + head * VALUE_DIM : 2 * keys + (head + 1) * VALUE_DIM]
            decay = np.exp(-np.exp(a_log[head]) * np.logaddexp(0, gate[head] + dt_bias[head]))
            kept, rate = decay * state[head], 1 / (1 + np.exp(-gate[HEADS + head]))
            state[head] = kept + np.outer(k, rate * (v - k @ kept))
            out[head, row] = KEY_DIM**-0.5 * q @ state[head]
    return out, state


@pytest.mark.parametrize("rows", [1, 5, 2 * CHUNK + 7])
def test_chunks_of_a_state_space_are_rows_one_by_one(rows: int) -> None:
    """Limits of dt on both sides, and groups of several heads."""
    rng, groups, depth = np.random.default_rng(rows), 2, 9
    space = StateSpace(HEADS, groups, depth, 0.2, 1.1)
    x = rng.normal(size=(rows, HEADS * VALUE_DIM + 2 * groups * depth))
    dt, a_log, dt_bias = rng.normal(size=(rows, HEADS)), rng.normal(size=HEADS), rng.normal(size=HEADS)
    state = rng.normal(size=(HEADS, 1, depth, VALUE_DIM))
    parts = space.parts(*(mx.array(each.astype(np.float32)) for each in (x, dt, a_log, dt_bias)))
    out, after = state_space(mx.array(state.astype(np.float32)), [part[:, None] for part in parts])
    value, b, c = np.split(x, [HEADS * VALUE_DIM, HEADS * VALUE_DIM + groups * depth], -1)
    steps, expected = np.clip(np.logaddexp(0, dt + dt_bias), 0.2, 1.1), []
    for row, step in enumerate(steps):
        keys, queries = (np.repeat(part[row].reshape(groups, -1), HEADS // groups, 0) for part in (b, c))
        decay, change = np.exp(-np.exp(a_log) * step), step[:, None] * value[row].reshape(HEADS, -1)
        state[:, 0] = decay[:, None, None] * state[:, 0] + keys[..., None] * change[:, None]
        expected.append(np.einsum("hij,hi->hj", state[:, 0], queries))
    np.testing.assert_allclose(np.array(out)[:, 0], np.stack(expected, 1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(after)[:, 0], state[:, 0], rtol=1e-4, atol=1e-4)


def test_rows_of_a_sequence_are_taken_in_order() -> None:
    """Slot 0 passes a border of columns; slots 1 and 2 have one row each and run together; slot 3 begins."""
    stride, table = 8, np.arange(16).reshape(4, 4)
    positions = np.array([6, 7, 8, 9, 5, 16, 0, 1])
    slots = np.array([0, 0, 0, 0, 1, 2, 3, 3])
    found = turns(positions, slots, table, stride)
    assert [turn.rows.tolist() for turn in found] == [[[4], [5]], [[0, 1], [6, 7]], [[2, 3]]]
    assert [turn.before for turn in found] == [(4, 9), (0, -1), (0,)]
    assert [turn.pages for turn in found] == [(4, 10), (0, 12), (1,)]
    x = mx.arange(8)[None]
    assert [np.array(turn.take(x)).tolist() for turn in found] == [[turn.rows.tolist()] for turn in found]
