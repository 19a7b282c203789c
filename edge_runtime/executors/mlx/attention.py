"""Attention by basic operations, for softcaps and quantized caches, which MLX's fused kernel does not
support.
"""

from __future__ import annotations

import mlx.core as mx


def weights(
    scores: mx.array, mask: mx.array | None, softcap: float | None, sinks: mx.array | None
) -> mx.array:
    """Softmax over the last axis of scores, in their dtype.

    `mask`: true for positions that are attended to. `sinks`: one extra logit for each row, broadcast to [...,
    1], whose weight is left out of the result.
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
