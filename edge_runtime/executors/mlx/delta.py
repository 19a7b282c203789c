"""The gated delta rule (nearfar.step.ops.Delta) in chunks of rows, by products of matrices.

S is the state before a chunk, G_r the sum of the logarithms of decay up to row r, β_r its rate, and d_r what
row r adds along k_r:
    (I + A) d = β · (v − e^G · Sᵀk)   with A_ri = β_r · e^(G_r − G_i) · (k_i·k_r) for i < r
    out_r = e^G_r · Sᵀq_r + Σ_{i≤r} e^(G_r − G_i) · (k_i·q_r) · d_i
    S ← e^G_n · S + Σ_i e^(G_n − G_i) · k_i ⊗ d_i
That is the WY form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (2024). I + A is
inverted by blocks of 1, 2, 4 … rows: its products are as stable as substitution row by row, which would be a
launch for each row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.executors.mlx.calls import Arrays

CHUNK = 64
"""The most rows of a chunk."""


@dataclass(frozen=True)
class Gated:
    """The sizes of an operation: heads of keys and of values, values of a head of keys, the epsilon."""

    key_heads: int
    heads: int
    key_dim: int
    eps: float
    tiled: bool = False

    def parts(self, x: mx.array, gates: mx.array, a_log: mx.array, dt_bias: mx.array) -> Arrays:
        """q, k [heads, L, key_dim] of length 1, v [heads, L, value_dim], and the logarithm of decay and the
        rate [heads, L], of x = [q | k | v] [L, width] and gates = [a | b] [L, 2·heads].
        """
        keys = self.key_heads * self.key_dim
        q, k = (self._unit(x[:, start : start + keys]) for start in (0, keys))
        v = mx.unflatten(x[:, 2 * keys :], -1, (self.heads, -1)).swapaxes(0, 1)
        a, b = mx.split(gates, 2, axis=-1)
        decay = -mx.exp(a_log) * mx.logaddexp(a + dt_bias, mx.array(0.0))
        return q * self.key_dim**-0.5, k, v, decay.T, mx.sigmoid(b).T

    def _unit(self, x: mx.array) -> mx.array:
        """Heads of keys with length 1, each for all its heads of values."""
        x = mx.unflatten(x, -1, (self.key_heads, -1)).swapaxes(0, 1)
        x = x * mx.rsqrt(mx.sum(mx.square(x), axis=-1, keepdims=True) + self.eps)
        each = self.heads // self.key_heads
        return mx.tile(x, (each, 1, 1)) if self.tiled else mx.repeat(x, each, axis=0)


def gated_delta(state: mx.array, parts: Arrays) -> tuple[mx.array, mx.array]:
    """See calls.Rule; `parts` as Gated makes them."""
    found, rows = [], parts[0].shape[2]
    for start in range(0, rows, CHUNK):
        out, state = _chunk(state, *(part[:, :, start : start + CHUNK] for part in parts))
        found.append(out)
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=2), state


def _chunk(
    state: mx.array, q: mx.array, k: mx.array, v: mx.array, decay: mx.array, rate: mx.array
) -> tuple[mx.array, mx.array]:
    """Rows of a chunk: states [heads, B, key_dim, value_dim], q, k, v [heads, B, T, …], the rest
    [heads, B, T].
    """
    rate, keys = mx.expand_dims(rate, -1), k.swapaxes(-1, -2)
    if k.shape[2] == 1:
        state = state * mx.expand_dims(mx.exp(decay), -1)
        state = state + keys * (rate * (v - k @ state))
        return q @ state, state
    sums = mx.cumsum(decay, axis=-1)
    grown, total = mx.expand_dims(mx.exp(sums), -1), sums[..., -1:]
    lower = _lower(k.shape[2])
    shrunk = mx.exp(mx.where(lower, mx.expand_dims(sums, -1) - mx.expand_dims(sums, -2), -mx.inf))
    added = _inverse(rate * shrunk * (k @ keys)) @ (rate * (v - grown * (k @ state)))
    out = grown * (q @ state) + (shrunk * (q @ keys)) @ added
    kept = keys * mx.expand_dims(mx.exp(total - sums), -2)
    return out, mx.expand_dims(mx.exp(total), -1) * state + kept @ added


def _inverse(a: mx.array) -> mx.array:
    """The inverse of I + the part of a [..., T, T] below its diagonal."""
    rows = a.shape[-1]
    inverse = mx.eye(rows)
    for between in _blocks(rows):
        inverse = inverse - inverse @ (a * between) @ inverse
    return inverse


@functools.lru_cache(maxsize=2 * CHUNK)
def _lower(rows: int) -> mx.array:
    """Whether column i ≤ row r."""
    return mx.array(np.tri(rows, dtype=bool))


@functools.lru_cache(maxsize=2 * CHUNK)
def _blocks(rows: int) -> tuple[mx.array, ...]:
    """For blocks of 1, 2, 4 … rows: 1 where a row is in the second block of a pair and a column in the
    first.
    """
    block, sizes = np.arange(rows), [1 << bit for bit in range((rows - 1).bit_length())]
    pairs = [(block // size, block // (2 * size)) for size in sizes]
    return tuple(
        mx.array(((own[:, None] > own) & (pair[:, None] == pair)).astype(np.float32)) for own, pair in pairs
    )
