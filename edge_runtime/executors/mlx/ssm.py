"""The state space of Mamba-2 (nearfar.step.ops.Ssm) as a recurrence: keys are B, queries are C, and a row
adds dt · x, whatever the state holds. That is the form of chunks of Dao & Gu, "Transformers are SSMs" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from nearfar.edge_runtime.executors.mlx.calls import Arrays
from nearfar.edge_runtime.executors.mlx.recurrence import RecurrenceChunk, recurrence


@dataclass(frozen=True)
class StateSpace:
    """The sizes of an operation, and the limits of dt: heads of x, vectors of B and of C, their length."""

    heads: int
    groups: int
    depth: int
    least: float
    most: float | None

    def parts(self, x: mx.array, dt: mx.array, a_log: mx.array, dt_bias: mx.array) -> Arrays:
        """C, B [heads, L, depth], x [heads, L, head_dim], the logarithm of decay and dt [heads, L], of
        x = [x | B | C] [L, width] and dt [L, heads].
        """
        shared = self.groups * self.depth
        inner = x.shape[-1] - 2 * shared
        value = mx.unflatten(x[:, :inner], -1, (self.heads, -1)).swapaxes(0, 1)
        c, b = (self._each(x[:, start : start + shared]) for start in (inner + shared, inner))
        step = mx.maximum(mx.logaddexp(dt + dt_bias, mx.array(0.0)), self.least)
        step = step if self.most is None else mx.minimum(step, self.most)
        return c, b, value, (-mx.exp(a_log) * step).T, step.T

    def _each(self, x: mx.array) -> mx.array:
        """The vectors of groups, each for all its heads."""
        x = mx.unflatten(x, -1, (self.groups, -1)).swapaxes(0, 1)
        return mx.repeat(x, self.heads // self.groups, axis=0)


def _change(chunk: RecurrenceChunk, v: mx.array, rate: mx.array) -> mx.array:
    return rate * v


state_space = recurrence(_change)
"""See calls.Rule; parts as StateSpace makes them."""
