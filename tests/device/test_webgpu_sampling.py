"""The WebGPU samplers against NumPy, through wgpu."""

from __future__ import annotations

import numpy as np
import pytest

from nearfar.format.sampler import BOUND, COLDEST
from nearfar.kernels.jobs import Greedy, Logprobs, Sample
from nearfar.targets.webgpu import VARIANTS

from . import webgpu_harness as harness

KERNELS = VARIANTS[0].kernels  # samplers are the same in all variants
SLOTS, VOCAB = 4, 5000


def pcg4d_first(low: int, high: int, counter: int, vocab: int) -> np.ndarray:
    """First word of pcg4d for every token (docs/artifact.md)."""
    with np.errstate(over="ignore"):
        given = np.stack(
            [np.full(vocab, v, np.uint32) for v in (low, high, counter)] + [np.arange(vocab, dtype=np.uint32)]
        )
        x, y, z, w = given * np.uint32(1664525) + np.uint32(1013904223)
        for turn in range(2):
            x = x + y * w
            y = y + z * x
            z = z + x * y
            w = w + y * z
            if turn == 0:
                x, y, z, w = (v ^ (v >> np.uint32(16)) for v in (x, y, z, w))
    return x


def reference(logits, f, i, bias, counts, allowed):
    """Token that docs/artifact.md samples for one row, in float64."""
    slot, top_k, low, high, counter = i[:5]
    vocab = len(logits)
    mask = (allowed[slot][np.arange(vocab) // 32] >> (np.arange(vocab, dtype=np.uint32) % 32)) & 1
    val = np.where(mask == 1, logits.astype(np.float64) + bias[slot], -np.inf)
    seen, made = counts[slot] != 0, counts[slot] & 0xFFFFFF
    val = np.where(seen, np.where(val > 0, val / f[3], val * f[3]), val)
    val = val - f[5] * made - f[4] * (made > 0)
    if f[0] == 0:
        return int(np.argmax(val))
    val = np.clip(val / max(f[0], np.float32(COLDEST)), -BOUND, BOUND)
    keep = np.ones(vocab, bool)
    if top_k > 0:
        keep &= val >= np.sort(val)[::-1][top_k - 1]
    if f[1] < 1:
        mass = np.where(keep, np.exp(val - val.max()), 0)
        order = np.argsort(-val, kind="stable")
        cut = np.searchsorted(np.cumsum(mass[order]), f[1] * mass.sum())
        keep &= val >= val[order[cut]]
    if f[2] > 0:
        keep &= val - val.max() >= np.log(f[2])
    u = ((pcg4d_first(low & 0xFFFFFFFF, high & 0xFFFFFFFF, counter, vocab) >> np.uint32(8)) + 0.5) * 2.0**-24
    return int(np.argmax(np.where(keep, val - np.log(-np.log(u)), -np.inf)))


def state(rng, rows):
    arrays = {
        "logits": (rng.standard_normal((16, VOCAB)) * 3).astype(np.float32),
        "sample_f32": np.tile(np.float32([1, 1, 0, 1, 0, 0, 0, 0]), (16, 1)),
        "sample_i32": np.tile(np.int32([-1, 0, 5, -9, 3, -1, 0, 0]), (16, 1)),
        "logit_bias": np.zeros((SLOTS, VOCAB), np.float32),
        "counts": np.zeros((SLOTS, VOCAB), np.int32),
        "allowed": np.full((SLOTS, (VOCAB + 31) // 32), 0xFFFFFFFF, np.uint32),
        "sampled": np.full(16, -7, np.int32),
        "tokens": np.full(256, -7, np.int32),
    }
    arrays["sample_i32"][:rows, 0] = np.arange(rows) % SLOTS
    return arrays


@pytest.mark.parametrize("rows", [1, 4])
def test_greedy(rows):
    arrays = state(np.random.default_rng(2), rows)
    logits = arrays["logits"]
    logits[0, [4000, 77, 2500]] = 50  # a tie: the lowest index wins
    logits[0, 3] = np.nan
    arrays["sample_i32"][0, 5] = 9
    if rows > 1:
        arrays["sample_i32"][2, 0] = -1
        logits[3] -= 1e6
    names = ("logits", "sample_i32", "sampled", "tokens")
    got = harness.run(KERNELS.stages(Greedy(rows, VOCAB)), "f32", {name: arrays[name] for name in names})
    want = [77, *(int(np.argmax(logits[r])) for r in range(1, rows))]
    if rows > 1:
        want[2] = -7
    assert got["sampled"].tolist() == want + [-7] * (16 - rows)
    assert got["tokens"][9] == 77
    assert (np.delete(got["tokens"], 9) == -7).all()


SETTINGS = {
    "plain": [1.0, 1.0, 0.0, 1.0, 0.0, 0.0],
    "cold": [0.0, 1.0, 0.0, 1.3, 0.5, 0.2],
    "top_p": [0.8, 0.9, 0.0, 1.0, 0.0, 0.0],
    "top_p_small": [1.5, 0.05, 0.0, 1.0, 0.0, 0.0],
    "top_p_none": [1.0, 1e-50, 0.0, 1.0, 0.0, 0.0],
    "top_p_least": [0.7, 1e-40, 0.02, 1.1, 0.0, 0.0],
    "min_p": [1.2, 1.0, 0.1, 1.1, 0.0, 0.0],
    "all": [0.7, 0.8, 0.02, 1.1, 0.3, 0.1],
    "coldest": [1e-30, 1.0, 0.0, 1.0, 0.0, 0.0],
    "coldest_all": [1e-30, 0.9, 0.02, 1.1, 0.3, 0.1],
}


def test_sample():
    """All settings as rows of few launches; every seed must give the reference's token, counts and feed."""
    rng = np.random.default_rng(3)
    cases = [(name, top_k, seed) for name in SETTINGS for top_k in (0, 1, 40) for seed in (0, 1 << 31)]
    for start in range(0, len(cases), 4):
        arrays = state(rng, 4)
        for r, (name, top_k, seed) in enumerate(cases[start : start + 4]):
            arrays["sample_f32"][r, :6] = SETTINGS[name]
            arrays["sample_i32"][r, :6] = [
                r,
                top_k,
                np.int64(seed).astype(np.int32),
                start,
                100 + r,
                r if r else -1,
            ]
            arrays["counts"][r] = (rng.random(VOCAB) < 0.2) * rng.integers(0, 3, VOCAB) + (
                rng.random(VOCAB) < 0.1
            ) * (1 << 24)
            arrays["logit_bias"][r, rng.integers(0, VOCAB, 20)] = 4
            arrays["allowed"][r] = rng.integers(0, 1 << 32, arrays["allowed"].shape[1], dtype=np.uint32)
        rows = [
            reference(
                arrays["logits"][r], arrays["sample_f32"][r], arrays["sample_i32"][r].tolist(),
                arrays["logit_bias"], arrays["counts"], arrays["allowed"],
            )
            for r in range(4)
        ]  # fmt: skip
        got = harness.run(KERNELS.stages(Sample(4, VOCAB, SLOTS)), "f32", arrays)
        assert got["sampled"][:4].tolist() == rows, cases[start : start + 4]
        assert got["tokens"][:4].tolist() == [-7, *rows[1:]]
        for r, token in enumerate(rows):
            arrays["counts"][r, token] += 1
        assert (got["counts"] == arrays["counts"]).all()


def test_sample_leaves_unused_rows_alone():
    arrays = state(np.random.default_rng(4), 0)
    got = harness.run(KERNELS.stages(Sample(1, VOCAB, SLOTS)), "f32", arrays)
    for name, before in arrays.items():
        assert (got[name] == before).all(), name


def test_logprobs():
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((16, VOCAB)) * 3).astype(np.float32)
    logits[0, [9, 4000, 33]] = 20
    logits[1] += 500
    arrays = {
        "logits": logits,
        "sampled": np.arange(16, dtype=np.int32) * 3,
        "logprob": np.full(16, 7, np.float32),
    }
    arrays |= {"top_ids": np.full((16, 20), -7, np.int32), "top_logprobs": np.zeros((16, 20), np.float32)}
    got = harness.run(KERNELS.stages(Logprobs(4, VOCAB)), "f32", arrays)
    wide = logits.astype(np.float64)
    want = (
        wide
        - wide.max(1, keepdims=True)
        - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True))
    )
    order = np.argsort(-wide, axis=1, kind="stable")[:, :20]
    assert (got["top_ids"][:4] == order[:4]).all()
    assert (got["top_ids"][4:] == -7).all()
    assert np.abs(got["top_logprobs"][:4] - np.take_along_axis(want, order, 1)[:4]).max() < 1e-4
    assert np.abs(got["logprob"][:4] - want[np.arange(4), arrays["sampled"][:4]]).max() < 1e-4
