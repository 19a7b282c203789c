"""Sampling on the CPU target against NumPy (docs/artifact.md has the rules)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.format.sampler import BOUND, COLDEST
from nearfar.kernels.jobs import Greedy, Logprobs, Sample
from tests.support.cpu_jobs import CpuJobs

SLOTS = 16
JOBS = [
    *(Greedy(4, vocab) for vocab in (512, 515)), *(Logprobs(4, vocab) for vocab in (512, 517, 5003)),
    *(Sample(16, vocab, SLOTS) for vocab in (32, 512, 517, 5003)),
]  # fmt: skip


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return CpuJobs(tmp_path_factory.mktemp("sampling"), JOBS)


@pytest.mark.parametrize("vocab", [512, 515])
def test_greedy(jobs, vocab):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((16, vocab)).astype(np.float32)
    logits[1, [3, 400, vocab - 1]] = 9  # a tie: the lowest index wins
    logits[2, [1, 2]] = [np.nan, 50]
    logits[3, vocab - 1] = 60
    sample_i32 = np.zeros((16, 8), np.int32)
    sample_i32[:, 5] = -1
    sample_i32[2, 5] = 200
    arrays = {"logits": logits, "sample_i32": sample_i32, "sampled": np.full(16, -7, np.int32)}
    got = jobs.run(Greedy(4, vocab), arrays | {"tokens": np.zeros(256, np.int32)})
    assert got["sampled"][:4].tolist() == [int(logits[0].argmax()), 3, 2, vocab - 1]
    assert (got["sampled"][4:] == -7).all()
    assert got["tokens"][200] == 2
    assert np.count_nonzero(got["tokens"]) == 1


def gumbel(seed: tuple[int, int], counter: int, vocab: int) -> np.ndarray:
    """The noise of docs/artifact.md in float64."""
    with np.errstate(over="ignore"):
        words = [np.full(vocab, value, np.uint32) for value in (*seed, counter)] + [
            np.arange(vocab, dtype=np.uint32)
        ]
        x, y, z, w = (word * np.uint32(1664525) + np.uint32(1013904223) for word in words)
        x = x + y * w
        y = y + z * x
        z = z + x * y
        w = w + y * z
        x, y, z, w = (word ^ (word >> np.uint32(16)) for word in (x, y, z, w))
        x = x + y * w
    u = ((x >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    return -np.log(-np.log(u))


def sample_reference(row: int, a: dict[str, np.ndarray]) -> int:
    f, i = a["sample_f32"][row].astype(np.float64), a["sample_i32"][row]
    slot, vocab = i[0], a["logits"].shape[1]
    x = a["logits"][row].astype(np.float64) + a["logit_bias"][slot]
    allowed = (a["allowed"][slot][np.arange(vocab) // 32] >> (np.arange(vocab) % 32).astype(np.uint32)) & 1
    x[allowed == 0] = -np.inf
    count = a["counts"][slot]
    x = np.where(count != 0, np.where(x > 0, x / f[3], x * f[3]), x)
    generated = count & 0xFFFFFF
    x = x - (f[5] * generated + f[4] * (generated > 0))
    if f[0] == 0:
        return int(x.argmax())
    x = np.where(np.isfinite(x), np.clip(x / max(f[0], np.float32(COLDEST)), -BOUND, BOUND), -np.inf)
    kept = np.isfinite(x)
    if i[1] > 0:
        kept &= x >= np.sort(x)[-min(int(i[1]), vocab)]
    if f[1] < 1:
        mass = np.where(kept, np.exp(x - x.max()), 0)
        order = np.argsort(-np.where(kept, x, -np.inf), kind="stable")
        reached = np.searchsorted(np.cumsum(mass[order]), f[1] * mass.sum())
        kept &= x >= x[order[min(reached, vocab - 1)]]
    if f[2] > 0:
        kept &= x - x.max() >= np.log(f[2])
    noise = gumbel((int(i[2].view(np.uint32)), int(i[3].view(np.uint32))), int(i[4]), vocab)
    return int(np.where(kept, x + noise, -np.inf).argmax())


SETTINGS = [  # temperature, top_p, min_p, repetition, presence, frequency; top_k
    (0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0),
    (0.0, 1.0, 0.0, 1.5, 0.5, 0.25, 0),
    (1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0),
    (0.8, 0.9, 0.0, 1.0, 0.0, 0.0, 0),
    (1.3, 1.0, 0.0, 1.1, 0.0, 0.0, 40),
    (1.0, 1.0, 0.1, 1.0, 0.0, 0.0, 0),
    (0.7, 0.5, 0.02, 1.2, 0.3, 0.1, 50),
    (2.0, 0.95, 0.0, 1.0, 0.0, 0.0, 5),
    (1.0, 0.001, 0.0, 1.0, 0.0, 0.0, 0),
    (1.0, 1e-50, 0.0, 1.0, 0.0, 0.0, 0),
    (1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1),
    (1.0, 0.3, 0.0, 1.0, 0.0, 0.0, 5000),
]


@pytest.mark.parametrize("vocab", [512, 517, 5003])
def test_sample(jobs, vocab):
    rng, job = np.random.default_rng(5), Sample(16, vocab, SLOTS)
    for trial in range(20):
        a = {
            "logits": (rng.standard_normal((16, vocab)) * 3).astype(np.float32),
            "sample_f32": np.zeros((16, 8), np.float32),
            "sample_i32": np.zeros((16, 8), np.int32),
            "logit_bias": np.where(
                rng.random((SLOTS, vocab)) < 0.1, rng.standard_normal((SLOTS, vocab)), 0
            ).astype(np.float32),
            "counts": np.where(
                rng.random((SLOTS, vocab)) < 0.2, rng.integers(0, 4, (SLOTS, vocab)), 0
            ).astype(np.int32),
            "allowed": rng.integers(0, 2**32, (SLOTS, (vocab + 31) // 32), dtype=np.uint64).astype(np.uint32),
            "sampled": np.full(16, -7, np.int32),
            "tokens": np.zeros(256, np.int32),
        }
        a["counts"] |= np.where(rng.random((SLOTS, vocab)) < 0.05, 1 << 24, 0).astype(np.int32)
        a["sample_i32"][:, 0] = rng.permutation(SLOTS)
        for row in range(16):
            setting = SETTINGS[row % len(SETTINGS)]
            a["sample_f32"][row, :6] = setting[:6]
            seed = rng.integers(-(2**31), 2**31, 2)
            a["sample_i32"][row, 1:6] = [setting[6], *seed, trial * 7, row * 2 if row % 2 else -1]
        a["sample_i32"][15, 0] = -1  # this row is unused
        want = [sample_reference(row, a) for row in range(15)]
        got = jobs.run(job, a)
        assert got["sampled"].tolist() == [*want, -7]
        assert jobs.run(job, a)["sampled"].tolist() == got["sampled"].tolist()
        counts = a["counts"].copy()
        for row in range(15):
            counts[a["sample_i32"][row, 0], want[row]] += 1
        assert (got["counts"] == counts).all()
        assert [got["tokens"][row * 2] for row in range(1, 15, 2)] == [want[row] for row in range(1, 15, 2)]


def plain(vocab: int, logits: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs of a sampler that changes no logit: temperature 1, the same seed and counter in each row."""
    floats, ints = np.zeros((16, 8), np.float32), np.zeros((16, 8), np.int32)
    floats[:, [0, 1, 3]], ints[:, 0], ints[:, 5] = 1, np.arange(16), -1
    return {
        "logits": logits.astype(np.float32), "sample_f32": floats, "sample_i32": ints,
        "logit_bias": np.zeros((SLOTS, vocab), np.float32), "counts": np.zeros((SLOTS, vocab), np.int32),
        "allowed": np.full((SLOTS, (vocab + 31) // 32), 0xFFFFFFFF, np.uint32),
        "sampled": np.full(16, -7, np.int32), "tokens": np.zeros(256, np.int32),
    }  # fmt: skip


def test_thresholds_among_many_equal_values(jobs):
    """Logits of few values, so that a bin, or all of them, has one value only; spans from 0 to thousands."""
    rng, vocab = np.random.default_rng(8), 5003
    for spread in (0.0, 0.01, 1.0, 4.0, 30.0, 3000.0):
        a = plain(vocab, np.round(rng.standard_normal((16, vocab)) * 3) * spread / 3)
        a["sample_i32"][:, 1] = [0, 1, 2, 3, 7, 40, 300, 2000, 5002, 5003, 9999, 50, 1, 0, 0, 0]
        a["sample_f32"][:, 1] = [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0.7, 0.0, 0.0, 1e-6, 0.999]
        a["sample_i32"][:, 4] = rng.integers(0, 2**31, 16)
        want = [sample_reference(row, a) for row in range(16)]
        assert jobs.run(Sample(16, vocab, SLOTS), a)["sampled"].tolist() == want


def test_nothing_to_sample_and_little(jobs):
    """Without a token that is finite and allowed the result is -1; a single one is always drawn; a logit that
    is not finite never is.
    """
    vocab, masked = 5003, np.full((16, 5003), -np.inf)
    masked[1] = np.nan
    masked[2] = np.inf
    for row, token in enumerate((0, 319, 320, 5002), 3):
        masked[row, token] = -1e30
    masked[7] = np.where(np.arange(vocab) == 4321, 3.0, np.nan)
    a = plain(vocab, masked)
    a["sample_i32"][8:, 0] = -1
    for k, p in ((0, 1.0), (5, 1.0), (0, 0.9), (5, 0.9)):
        a["sample_i32"][:, 1], a["sample_f32"][:, 1] = k, p
        got = jobs.run(Sample(16, vocab, SLOTS), a)["sampled"]
        assert got.tolist() == [-1, -1, -1, 0, 319, 320, 5002, 4321] + [-7] * 8


@pytest.mark.parametrize("spread", [3.0, 1e12, 1e36, 1e38])
def test_quotients_beyond_float32_stay_numbers(jobs, spread):
    """Temperatures near 0 and logits of any size: the choice is the reference's, with every filter."""
    rng, vocab = np.random.default_rng(11), 5003
    for temperature in (1e-45, 1e-30, 1e-6, 0.5, 100.0):
        a = plain(vocab, np.clip(rng.standard_normal((16, vocab)) * spread, -3.4e38, 3.4e38))
        a["sample_f32"][:, 0] = temperature
        a["sample_i32"][:, 1] = [0, 1, 40, 5002, 9999, 0, 0, 0] * 2
        a["sample_f32"][:, 1] = [1, 1, 1, 0.9, 1, 0.5, 1e-6, 1] * 2
        a["sample_f32"][7:9, 2] = 0.1
        a["sample_i32"][:, 4] = rng.integers(0, 2**31, 16)
        with np.errstate(over="ignore", invalid="ignore"):
            want = [sample_reference(row, a) for row in range(16)]
        assert jobs.run(Sample(16, vocab, SLOTS), a)["sampled"].tolist() == want, temperature


def test_sample_follows_the_distribution(jobs):
    """Over many counters, frequencies are those of the softmax."""
    vocab = 32
    logits = np.repeat(np.random.default_rng(2).standard_normal((1, vocab)).astype(np.float32), 16, axis=0)
    job = Sample(16, vocab, SLOTS)
    a = {
        "logits": logits,
        "sample_f32": np.tile(np.array([1, 1, 0, 1, 0, 0, 0, 0], np.float32), (16, 1)),
        "sample_i32": np.zeros((16, 8), np.int32),
        "logit_bias": np.zeros((16, vocab), np.float32),
        "counts": np.zeros((16, vocab), np.int32),
        "allowed": np.full((16, 1), 0xFFFFFFFF, np.uint32),
        "sampled": np.zeros(16, np.int32),
        "tokens": np.zeros(256, np.int32),
    }
    a["sample_i32"][:, 0], a["sample_i32"][:, 5] = np.arange(16), -1
    hits = np.zeros(vocab)
    for step in range(300):
        a["sample_i32"][:, 4] = np.arange(16) + step * 16
        np.add.at(hits, jobs.run(job, a)["sampled"], 1)
    p = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert np.abs(hits / hits.sum() - p).max() < 0.02


@pytest.mark.parametrize("vocab", [512, 517, 5003])
def test_logprobs(jobs, vocab):
    """Includes ties, also across groups of tokens."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((16, vocab)) * 4).astype(np.float32)
    logits[1, [7, 3, 500]] = 20  # ties: lowest index first
    logits[2] = np.round(logits[2])
    sampled = rng.integers(0, vocab, 16).astype(np.int32)
    arrays = {
        "logits": logits, "sampled": sampled, "logprob": np.zeros(16, np.float32),
        "top_ids": np.zeros((16, 20), np.int32), "top_logprobs": np.zeros((16, 20), np.float32),
    }  # fmt: skip
    got = jobs.run(Logprobs(4, vocab), arrays)
    wide = logits.astype(np.float64)
    want = (
        wide
        - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True))
        - wide.max(1, keepdims=True)
    )
    for r in range(4):
        order = np.argsort(-wide[r], kind="stable")[:20]
        assert got["top_ids"][r].tolist() == order.tolist()
        np.testing.assert_allclose(got["top_logprobs"][r], want[r, order], atol=1e-5)
        np.testing.assert_allclose(got["logprob"][r], want[r, sampled[r]], atol=1e-5)
