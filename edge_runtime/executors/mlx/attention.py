"""Attention in plain operations: softcaps, quantized caches and free shapes have no fused kernel."""

from __future__ import annotations

import mlx.core as mx


def weights(
    scores: mx.array, mask: mx.array | None, softcap: float | None, sinks: mx.array | None
) -> mx.array:
    """Softmax over the last axis of scores, in their dtype.

    `mask`: true where a position is attended to. `sinks`: one more logit a row, broadcast to [..., 1],
    without a weight in the result.
    """
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    wide, sink = scores.astype(mx.float32), sinks.astype(mx.float32)
    top = mx.maximum(mx.max(wide, axis=-1, keepdims=True), sink)
    powers = mx.exp(wide - top)
    total = mx.sum(powers, axis=-1, keepdims=True) + mx.exp(sink - top)
    return (powers / total).astype(scores.dtype)
