"""The sampler of docs/artifact.md in NumPy. It computes only what the present rows request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.format.sampler import BOUND, COLDEST, SampleF32, SampleI32
from nearfar.format.sizes import TOP_LOGPROBS

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
NOTHING = np.float32(-np.inf)


@dataclass(frozen=True)
class SamplerRow:
    """The inputs of the sampler for one row in addition to its logits [vocab].

    `floats`, `ints` [8]: the row in `sample_f32` and `sample_i32`. From the row's slot: `bias` float32
    [vocab], `counts` int32 [vocab], and `allowed`, uint32 words.
    """

    floats: Floats
    ints: Array
    bias: Floats
    counts: Array
    allowed: Array


def greedy(logits: Floats) -> int:
    """The argmax over the finite logits [vocab], the lowest index on ties; −1 where none is finite."""
    return _best(_finite(logits))


def sample(logits: Floats, choice: SamplerRow) -> int:
    """Steps 1 to 9 of "sample" in docs/artifact.md for one row: returns a token, or −1."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        score = _finite(_penalized(logits, choice))
        temperature = choice.floats[SampleF32.TEMPERATURE]
        if temperature == 0 or not np.isfinite(score).any():
            return _best(score)
        bounded = np.clip(score / max(temperature, np.float32(COLDEST)), -BOUND, BOUND)
        score = np.where(score > NOTHING, bounded, NOTHING).astype(np.float32)
        seeds = choice.ints[SampleI32.SEED_LOW : SampleI32.COUNTER + 1].view(np.uint32)
        return _best(np.where(_kept(score, choice), score + gumbel(seeds, len(score)), NOTHING))


def gumbel(seeds: Array, vocab: int) -> Floats:
    """Gumbel noise of each token, float32 [vocab], for seeds uint32 [3] (low, high, counter).

    It is made with pcg4d (Jarzynski & Olano, JCGT 2020), as docs/artifact.md specifies.
    """
    token = np.arange(vocab, dtype=np.uint32)
    words = [np.full(vocab, word, np.uint32) for word in seeds] + [token]
    x, y, z, w = (word * np.uint32(1664525) + np.uint32(1013904223) for word in words)
    x = x + y * w
    y = y + z * x
    z = z + x * y
    w = w + y * z
    x, y, z, w = (word ^ (word >> np.uint32(16)) for word in (x, y, z, w))
    x = x + y * w
    uniform = ((x >> np.uint32(8)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
    return np.asarray(-np.log(np.maximum(-np.log(uniform), np.float32(2.0**-24))), np.float32)


def logprobs(logits: Floats, sampled: Array) -> tuple[Array, Array, Array]:
    """Log-softmax of logits [R, vocab] at `sampled` [R], and the ids and values of the likeliest tokens, best
    first.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        top = logits.max(axis=-1, keepdims=True)
        values = logits - (top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP_LOGPROBS].astype(np.int32)
    chosen = np.take_along_axis(values, np.maximum(sampled, 0)[:, None], axis=-1)[:, 0]
    return chosen, order, np.take_along_axis(values, order, axis=-1)


def _finite(score: Floats) -> Floats:
    return np.where(np.isfinite(score), score, NOTHING)


def _best(score: Floats) -> int:
    best = int(score.argmax())
    return best if score[best] > NOTHING else -1


def _penalized(logits: Floats, choice: SamplerRow) -> Floats:
    """Steps 1 to 4 of "sample": bias, allowed tokens, penalties."""
    score = logits + choice.bias
    if not (choice.allowed == np.uint32(0xFFFFFFFF)).all():
        bits = np.unpackbits(choice.allowed.view(np.uint8), bitorder="little")[: len(score)]
        score = np.where(bits.astype(bool), score, NOTHING)
    repetition, presence, frequency = (
        choice.floats[column]
        for column in (
            SampleF32.REPETITION_PENALTY,
            SampleF32.PRESENCE_PENALTY,
            SampleF32.FREQUENCY_PENALTY,
        )
    )
    if repetition == 1 and presence == 0 and frequency == 0:
        return score
    scaled = np.where(score > 0, score / repetition, score * repetition)
    score = np.where(choice.counts != 0, scaled, score)
    generated = (choice.counts & 0xFFFFFF).astype(np.float32)
    return np.asarray(score - frequency * generated - presence * (generated > 0), np.float32)


def _kept(score: Floats, choice: SamplerRow) -> Array:
    """Steps 6 to 8 of "sample", as a mask bool [vocab]: top-k, top-p, min-p."""
    top_k, top_p = int(choice.ints[SampleI32.TOP_K]), choice.floats[SampleF32.TOP_P]
    min_p, top = choice.floats[SampleF32.MIN_P], score.max()
    kept = score > NOTHING
    if 0 < top_k < len(score):
        kept &= score >= np.partition(score, -top_k)[-top_k]
    if top_p < 1:
        descending = -np.sort(-score[kept])
        mass = np.cumsum(np.exp(descending - top))
        kept &= score >= descending[int(np.argmax(mass >= top_p * mass[-1]))]
    if min_p > 0:
        kept &= score - top >= np.log(min_p)
    return kept
