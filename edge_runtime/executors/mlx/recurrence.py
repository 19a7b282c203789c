"""States S [depth, width] that each row changes, in chunks of rows, by products of matrices.

A row r has a key k_r, a query q_r, a decay and a change d_r: S ← decay_r · S + k_r ⊗ d_r, out_r = Sᵀq_r.
Where S is the state before a chunk, and G_r the sum of the logarithms of decay up to row r:
    out_r = e^G_r · Sᵀq_r + Σ_{i≤r} e^(G_r − G_i) · (k_i·q_r) · d_i
    S ← e^G_n · S + Σ_i e^(G_n − G_i) · k_i ⊗ d_i
A `Change` says what d is (delta.py, ssm.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.executors.mlx.calls import Arrays, Rule

CHUNK = 64
"""The most rows of a chunk."""


@dataclass(frozen=True)
class RecurrenceChunk:
    """Rows of a chunk, and the state before them: [heads, B, depth, width]. `keys`: [heads, B, T, depth].

    `grown`: e^G of each row [heads, B, T, 1]; `shrunk`: e^(G_r − G_i), and 0 where i > r, [heads, B, T, T].
    A chunk of one row has neither: its state has decayed already.
    """

    state: mx.array
    keys: mx.array
    grown: mx.array | None = None
    shrunk: mx.array | None = None

    def read(self, rows: mx.array) -> mx.array:
        """What rows [heads, B, T, depth] read of the state that has decayed up to each: e^G · Sᵀrow."""
        found = rows @ self.state
        return found if self.grown is None else self.grown * found

    def alike(self, rows: mx.array) -> mx.array:
        """The weight of the change of row i in what row r reads: e^(G_r − G_i) · (k_i·row_r), for i ≤ r."""
        found = rows @ self.keys.swapaxes(-1, -2)
        return found if self.shrunk is None else self.shrunk * found


Change = Callable[[RecurrenceChunk, mx.array, mx.array], mx.array]
"""The changes d [heads, B, T, width] of a chunk's rows, of values [heads, B, T, width] and of rates
[heads, B, T, 1].
"""


def recurrence(change: Change) -> Rule:
    """The rule of a change. Its parts: queries, keys, values [heads, B, T, …], logarithms of decay and rates
    [heads, B, T].
    """

    def rule(state: mx.array, parts: Arrays) -> tuple[mx.array, mx.array]:
        found, rows = [], parts[0].shape[2]
        for start in range(0, rows, CHUNK):
            out, state = _chunk(change, state, *(part[:, :, start : start + CHUNK] for part in parts))
            found.append(out)
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=2), state

    return rule


def _chunk(
    change: Change, state: mx.array, q: mx.array, k: mx.array, v: mx.array, decay: mx.array, rate: mx.array
) -> tuple[mx.array, mx.array]:
    """Results and the state behind the rows of a chunk."""
    rate, keys = mx.expand_dims(rate, -1), k.swapaxes(-1, -2)
    if k.shape[2] == 1:
        state = state * mx.expand_dims(mx.exp(decay), -1)
        state = state + keys * change(RecurrenceChunk(state, k), v, rate)
        return q @ state, state
    sums = mx.cumsum(decay, axis=-1)
    between = mx.expand_dims(sums, -1) - mx.expand_dims(sums, -2)
    shrunk = mx.exp(mx.where(_lower(k.shape[2]), between, -mx.inf))
    chunk = RecurrenceChunk(state, k, mx.expand_dims(mx.exp(sums), -1), shrunk)
    added, total = change(chunk, v, rate), sums[..., -1:]
    kept = keys * mx.expand_dims(mx.exp(total - sums), -2)
    out = chunk.read(q) + chunk.alike(q) @ added
    return out, mx.expand_dims(mx.exp(total), -1) * state + kept @ added


@functools.lru_cache(maxsize=2 * CHUNK)
def _lower(rows: int) -> mx.array:
    """Whether column i ≤ row r."""
    return mx.array(np.tri(rows, dtype=bool))
