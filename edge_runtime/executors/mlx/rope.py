"""Rotary position embedding of rows at any positions of their sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.executors.mlx.rows import Array

Turn = Callable[[mx.array], mx.array]
"""Rotates [rows, heads, head_dim], each row by its own position."""


class Rotator:
    """Rotates pairs (i, i + head_dim/2) by position · inv_freq[i] and scales them. Pairs with frequency 0
    stay as they are.
    """

    def __init__(self, inv_freq: Sequence[float], scale: float, dtype: mx.Dtype, fused: bool) -> None:
        """`fused`: rotate with MLX's kernel, one launch on a GPU.

        On a CPU that kernel is a dozen operations each time. So there, the cosines are computed once a step
        for all layers, in float64 as for the other targets.
        """
        self._inv_freq = np.array(inv_freq, np.float64)
        turning = self._inv_freq != 0
        periods = np.divide(1, self._inv_freq, out=np.full(len(turning), np.inf), where=turning)
        self._periods = mx.array(periods.astype(np.float32))
        self._scales = np.where(turning, scale, 1.0)
        """The scale of each pair."""
        self._factors = (
            None if (self._scales == 1).all() else mx.array(np.tile(self._scales, 2)).astype(dtype)
        )
        self._dtype, self._fused = dtype, fused

    def turn(self, positions: Array) -> Turn:
        """The rotation of rows at these positions."""
        return self._kernel(positions) if self._fused else self._tables(positions)

    def _kernel(self, positions: Array) -> Turn:
        offsets, periods, factors = mx.array(positions.astype(np.int32)), self._periods, self._factors

        def turn(x: mx.array) -> mx.array:
            out = mx.fast.rope(
                x[:, :, None],
                x.shape[-1],
                traditional=False,
                base=None,
                scale=1.0,
                offset=offsets,
                freqs=periods,
            )[:, :, 0]
            return out if factors is None else out * factors

        return turn

    def _tables(self, positions: Array) -> Turn:
        angles = positions.astype(np.float64)[:, None, None] * self._inv_freq
        cos, sin = np.cos(angles) * self._scales, np.sin(angles) * self._scales
        straight = mx.array(np.concatenate([cos, cos], -1).astype(np.float32)).astype(self._dtype)
        crossed = mx.array(np.concatenate([-sin, sin], -1).astype(np.float32)).astype(self._dtype)

        made: dict[tuple[int, ...], tuple[mx.array, mx.array]] = {}

        def turn(x: mx.array) -> mx.array:
            # the table is made once for all layers of a kind, not twice in each product
            if x.shape not in made:
                made[x.shape] = mx.broadcast_to(straight, x.shape), mx.broadcast_to(crossed, x.shape)
            wide, signed = made[x.shape]
            first, second = mx.split(x, 2, axis=-1)
            return x * wide + mx.concatenate([second, first], axis=-1) * signed

        return turn
