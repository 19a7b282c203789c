"""The sampler of docs/artifact.md in MLX operations. It computes only what the present rows request."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.executors.mlx.rows import Array
from nearfar.format.sampler import BOUND, COLDEST, SampleF32, SampleI32
from nearfar.format.sizes import TOP_LOGPROBS

PENALTIES = (SampleF32.REPETITION_PENALTY, SampleF32.PRESENCE_PENALTY, SampleF32.FREQUENCY_PENALTY)


@dataclass(frozen=True)
class SamplerRows:
    """The inputs of the sampler in addition to logits, one row for each row of logits.

    `sample_f32` and `sample_i32` [R, 8]; `bias` (float32 [R, V]), `allowed` (bool [R, V]) and `counts` (int32
    [R, V]) are None if no row needs them.
    """

    floats: Array
    ints: Array
    bias: Array | None = None
    allowed: Array | None = None
    counts: mx.array | None = None


def greedy(logits: mx.array) -> mx.array:
    """int32 [R]: the argmax over the finite logits [R, V], lowest index on ties; -1 where none is finite."""
    return _best(_finite(logits))


def sample(logits: mx.array, choice: SamplerRows) -> mx.array:
    """int32 [R]: steps 1 to 9 of "sample" in docs/artifact.md, for logits [R, V]."""
    score = _finite(_penalized(logits, choice))
    temperature = choice.floats[:, SampleF32.TEMPERATURE]
    best = _best(score)
    if not temperature.any():
        return best
    divisor = np.where(temperature == 0, np.float32(1), np.maximum(temperature, np.float32(COLDEST)))
    score = mx.where(score > -mx.inf, mx.clip(score / _column(divisor), -BOUND, BOUND), -mx.inf)
    noise = gumbel(choice.ints[:, SampleI32.SEED_LOW : SampleI32.COUNTER + 1].view(np.uint32), score.shape[1])
    drawn = _best(mx.where(_kept(score, choice), score + noise, -mx.inf))
    return mx.where(mx.array(temperature == 0), best, drawn)


def gumbel(seeds: Array, vocab: int) -> mx.array:
    """Gumbel noise of each token, float32 [R, vocab], for seeds uint32 [R, 3] (low, high, counter).

    It is made with pcg4d (Jarzynski & Olano, JCGT 2020), as docs/artifact.md specifies.
    """
    words = [_column(seeds[:, i]) for i in range(3)]
    token = mx.arange(vocab, dtype=mx.uint32)[None]
    x, y, z, w = (
        word * mx.array(1664525, mx.uint32) + mx.array(1013904223, mx.uint32) for word in (*words, token)
    )
    x = x + y * w
    y = y + z * x
    z = z + x * y
    w = w + y * z
    x, y, z, w = (word ^ (word >> mx.array(16, mx.uint32)) for word in (x, y, z, w))
    x = x + y * w
    uniform = ((x >> mx.array(8, mx.uint32)).astype(mx.float32) + 0.5) * 2.0**-24
    return -mx.log(mx.maximum(-mx.log(uniform), 2.0**-24))


def logprobs(logits: mx.array, sampled: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Log-softmax of logits [R, V] at `sampled` [R], and the ids and values of the likeliest tokens, best
    first.
    """
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    order = mx.argsort(-logits, axis=-1)[:, :TOP_LOGPROBS].astype(mx.int32)
    chosen = mx.take_along_axis(values, mx.maximum(sampled, 0)[:, None], axis=-1)[:, 0]
    return chosen, order, mx.take_along_axis(values, order, axis=-1)


def _finite(score: mx.array) -> mx.array:
    return mx.where(mx.isfinite(score), score, -mx.inf)


def _best(score: mx.array) -> mx.array:
    """int32 [R]: the argmax of scores [R, V]; -1 where all are -inf."""
    best = mx.argmax(score, axis=-1).astype(mx.int32)
    return mx.where(mx.max(score, axis=-1) > -mx.inf, best, -1)


def _penalized(logits: mx.array, choice: SamplerRows) -> mx.array:
    """Steps 1 to 4 of "sample": bias, allowed tokens, penalties."""
    score = logits
    if choice.bias is not None:
        score = score + mx.array(choice.bias)
    if choice.allowed is not None:
        score = mx.where(mx.array(choice.allowed), score, -mx.inf)
    if choice.counts is None:
        return score
    repetition, presence, frequency = (_column(choice.floats[:, i]) for i in PENALTIES)
    scaled = mx.where(score > 0, score / repetition, score * repetition)
    score = mx.where(choice.counts != 0, scaled, score)
    generated = (choice.counts & 0xFFFFFF).astype(mx.float32)
    return score - frequency * generated - presence * (generated > 0)


def _kept(score: mx.array, choice: SamplerRows) -> mx.array:
    """Steps 6 to 8 of "sample", as a mask bool [R, V]: top-k, top-p, min-p."""
    vocab, top_k = score.shape[1], choice.ints[:, SampleI32.TOP_K]
    top_p, min_p = choice.floats[:, SampleF32.TOP_P], choice.floats[:, SampleF32.MIN_P]
    top = mx.max(score, axis=-1, keepdims=True)
    kept = score > -mx.inf
    by_rank, by_mass = (top_k > 0) & (top_k < vocab), top_p < 1
    if by_rank.any() or by_mass.any():
        descending = -mx.sort(-score, axis=-1)
        last = _column(np.where(by_rank, top_k, vocab).astype(np.int32) - 1)
        lowest = mx.take_along_axis(descending, last, axis=-1)
        kept = kept & (score >= lowest)
        if by_mass.any():
            weights = mx.where(descending >= lowest, mx.exp(descending - top), 0)
            mass = mx.cumsum(weights, axis=-1)
            enough = mass >= _column(np.where(by_mass, top_p, np.float32(0))) * mass[:, -1:]
            least = mx.take_along_axis(descending, mx.argmax(enough, axis=-1, keepdims=True), axis=-1)
            kept = kept & ((score >= least) | _column(~by_mass))
    if (min_p > 0).any():
        bound = np.log(np.where(min_p > 0, min_p, np.float32(1)), dtype=np.float32)
        kept = kept & (score - top >= _column(np.where(min_p > 0, bound, -np.inf).astype(np.float32)))
    return kept


def _column(values: Array) -> mx.array:
    return mx.array(np.ascontiguousarray(values))[:, None]
