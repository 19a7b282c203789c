"""The gated delta rule (nearfar.step.ops.Delta) as a recurrence (recurrence.py).

With β_r the rate of a row, its change d_r is what the state lacks of v_r:
    (I + A) d = β · (v − e^G · Sᵀk)   with A_ri = β_r · e^(G_r − G_i) · (k_i·k_r) for i < r
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
from nearfar.edge_runtime.executors.mlx.recurrence import CHUNK, RecurrenceChunk, recurrence


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


def _change(chunk: RecurrenceChunk, v: mx.array, rate: mx.array) -> mx.array:
    added = rate * (v - chunk.read(chunk.keys))
    return added if v.shape[2] == 1 else _inverse(rate * chunk.alike(chunk.keys)) @ added


gated_delta = recurrence(_change)
"""See calls.Rule; parts as Gated makes them."""


def _inverse(a: mx.array) -> mx.array:
    """The inverse of I + the part of a [..., T, T] below its diagonal."""
    rows = a.shape[-1]
    inverse = mx.eye(rows)
    for between in _blocks(rows):
        inverse = inverse - inverse @ (a * between) @ inverse
    return inverse


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
