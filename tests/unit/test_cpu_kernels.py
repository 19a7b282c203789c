"""Every CPU kernel against NumPy."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from nearfar.edge_runtime.executors.cpu.library import Library, Tensor, aligned  # noqa: E402
from nearfar.targets.cpu import KERNELS  # noqa: E402
from nearfar.targets.cpu.codegen import compile_library  # noqa: E402
from nearfar.targets.jobs import Attention, Linear  # noqa: E402
from nearfar.targets.kernels import Staged  # noqa: E402
from nearfar.targets.quantized import Matrix, QuantTensor  # noqa: E402

_numbers = itertools.count()


class Runner:
    """Compiles one job and runs it on arrays given by the job's param names."""

    def __init__(self, folder: Path, staged: Staged, threads: int = 2) -> None:
        self.staged = staged
        functions = {f"k{i}": s.func.with_attr("global_symbol", f"k{i}") for i, s in enumerate(staged.stages)}
        path = folder / f"model{next(_numbers)}.so"
        self.features = compile_library(tvm.IRModule(functions), path)
        self.library = Library(path)
        self.pool = self.library.pool(threads)

    def __call__(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        held: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            held[name] = aligned(array.shape, array.dtype)
            held[name][...] = array
        for i, (shape, dtype) in enumerate(self.staged.scratch):
            held[f"scratch:{i}"] = aligned(shape, dtype)
        launches = [(f"k{i}", [Tensor(held[arg]) for arg in stage.args]) for i, stage in enumerate(self.staged.stages)]
        self.pool.replay(self.library.bind(launches))
        return held


def random_quant(rng: np.random.Generator, matrix: Matrix) -> QuantTensor:
    codes = rng.integers(0, 2**matrix.bits, (matrix.n, matrix.k)).astype(np.uint8)
    scales = ((0.5 + rng.random((matrix.n, matrix.k // matrix.group))) / 2**matrix.bits / np.sqrt(matrix.k)).astype(
        np.float16
    )
    return QuantTensor.of_codes(codes, scales, (-scales * 2 ** (matrix.bits - 1)).astype(np.float16), matrix.bits)


def dequantize(matrix: Matrix, q: QuantTensor) -> np.ndarray:
    wide = q.codes.reshape(matrix.n, -1, matrix.group).astype(np.float64)
    return (wide * q.scales[..., None].astype(np.float64) + q.biases[..., None].astype(np.float64)).reshape(
        matrix.n, matrix.k
    )


def make(rng: np.random.Generator, matrix: Matrix) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Packed parts by param name, and the matrix in float64."""
    if matrix.quantized:
        q = random_quant(rng, matrix)
        packed, plain = KERNELS.pack(matrix, q), dequantize(matrix, q)
    else:
        dense = (rng.standard_normal((matrix.n, matrix.k)) / np.sqrt(matrix.k)).astype(
            np.float16 if matrix.bits == 16 else np.float32
        )
        packed, plain = KERNELS.pack(matrix, dense), dense.astype(np.float64)
    for array, part in zip(packed, KERNELS.parts(matrix), strict=True):
        assert (array.shape, array.dtype) == (part.shape, np.dtype(part.dtype))
    return {f"w{i}": array for i, array in enumerate(packed)}, plain


def linear_reference(job: Linear, a: dict[str, np.ndarray], w: np.ndarray) -> np.ndarray:
    x = a["x"].astype(np.float64)
    if job.rows:
        x = x[a["logit_rows"][: job.m]]
    if job.norm is not None:
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + job.norm) * a["norm"]
    y = x @ w.T
    if job.bias:
        y = y + a["bias"]
    if job.gated:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    return y + a["residual"] if job.residual else y


def check_linear(tmp_path: Path, job: Linear, tolerance: float) -> None:
    rng = np.random.default_rng(job.m * 1000 + job.matrix.n)
    arrays, w = make(rng, job.matrix)
    n = job.matrix.n // 2 if job.gated else job.matrix.n
    arrays["x"] = rng.standard_normal((job.x_rows if job.rows else job.m, job.matrix.k)).astype(np.float32)
    arrays["x"][0, 3] = 40.0  # an outlier, as models have them
    if job.rows:
        arrays["logit_rows"] = rng.integers(0, job.x_rows, 16).astype(np.int32)
    if job.norm is not None:
        arrays["norm"] = rng.random(job.matrix.k, np.float32) + 0.5
    if job.bias:
        arrays["bias"] = rng.standard_normal(job.matrix.n).astype(np.float32)
    if job.residual:
        arrays["residual"] = rng.standard_normal((job.m, n)).astype(np.float32)
    arrays["out"] = np.full((16 if job.rows else job.m, n), 7, np.float32)
    want = linear_reference(job, arrays, w)
    got = Runner(tmp_path, KERNELS.linear(job))(**arrays)["out"]
    assert np.abs(got[: job.m] - want).max() <= tolerance * max(1, np.abs(want).max())
    assert (got[job.m :] == 7).all()


def job(m: int, matrix: Matrix, **options: Any) -> Linear:
    return Linear(m, matrix, "float32", "float32", **options)


@pytest.mark.parametrize("m", [1, 4, 16, 64])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_linear(tmp_path, bits, group, m):
    check_linear(tmp_path, job(m, Matrix(512, 192, bits, group), norm=1e-5, residual=True), 2e-4)


@pytest.mark.parametrize("m", [1, 4, 16, 64])
@pytest.mark.parametrize("bits", [16, 32])
def test_dense_linear(tmp_path, bits, m):
    check_linear(tmp_path, job(m, Matrix(64, 172, bits), residual=True), 2e-6)


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(
    "matrix", [Matrix(344, 64, 32), Matrix(1024, 64, 16), Matrix(1024, 128, 4, 64), Matrix(344, 128, 8, 32)]
)
@pytest.mark.parametrize("options", [{}, {"bias": True, "residual": True}])
def test_gated_linear(tmp_path, m, matrix, options):
    check_linear(tmp_path, job(m, matrix, norm=1e-6, gated=True, **options), 2e-4 if matrix.quantized else 5e-6)


@pytest.mark.parametrize(
    "matrix", [Matrix(512, 64, 32), Matrix(515, 64, 16), Matrix(515, 64, 4, 32), Matrix(512, 192, 8, 64)]
)
@pytest.mark.parametrize(("m", "x_rows"), [(1, 1), (4, 4), (16, 64)])
def test_lm_head(tmp_path, matrix, m, x_rows):
    check_linear(tmp_path, job(m, matrix, norm=1e-5, rows=True, x_rows=x_rows), 2e-4 if matrix.quantized else 5e-6)


@pytest.mark.parametrize(
    "matrix", [Matrix(512, 64, 32), Matrix(515, 172, 16), Matrix(515, 64, 4, 32), Matrix(512, 192, 8, 64)]
)
def test_embed(tmp_path, matrix):
    rng = np.random.default_rng(0)
    arrays, w = make(rng, matrix)
    tokens = np.zeros(256, np.int32)
    tokens[:4] = [0, 17, matrix.n - 1, 5]
    got = Runner(tmp_path, KERNELS.embed(4, matrix))(tokens=tokens, out=np.zeros((4, matrix.k), np.float32), **arrays)[
        "out"
    ]
    np.testing.assert_allclose(got, w[tokens[:4]], rtol=1e-6, atol=1e-6)


def attention_arrays(rng: np.random.Generator, a: Attention, pages: int) -> dict[str, np.ndarray]:
    table = rng.permutation(pages)[: a.slots * a.pages_per_slot].reshape(a.slots, a.pages_per_slot).astype(np.int32)
    shape = (pages, a.kv_heads, a.page_size, a.head_dim)
    return {
        "page_table": table,
        "k_cache": np.zeros(shape, a.kv_dtype),
        "v_cache": np.zeros(shape, a.kv_dtype),
        "positions": np.full(256, -1, np.int32),
        "slots": np.zeros(256, np.int32),
    }


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x [..., d] by angles [..., d/2]."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("qk_norm", [None, 1e-6])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(8, 4, 8), (9, 3, 64), (4, 1, 128)])
def test_rope_append_then_attention(tmp_path, heads, kv_heads, d, qk_norm, kv_dtype):
    """A sequence appended in chunks of m rows, with padding and a second sequence, attends like plain attention."""
    rng, m, context = np.random.default_rng(1), 4, 64
    a = Attention(m, heads, kv_heads, d, 16, 2, 4, "float32", kv_dtype, d**-0.5)
    held = attention_arrays(rng, a, 12)
    freq = 10000.0 ** (-np.arange(d // 2) / (d // 2))
    angle = np.arange(context)[:, None] * freq
    held["rope"] = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    weights = rng.random((2, d)).astype(np.float32) + 0.5
    if qk_norm is not None:
        held |= {"q_norm": weights[0], "k_norm": weights[1]}
    rope, attend = Runner(tmp_path, KERNELS.rope_append(a, qk_norm)), Runner(tmp_path, KERNELS.attention(a))
    seen: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {0: [], 1: []}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x if qk_norm is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + qk_norm) * weight

    for step in range(12):
        rows = [(0, len(seen[0])), (1, len(seen[1])), (0, -1), (0, len(seen[0]) + 1)]
        qkv = rng.standard_normal((m, (heads + 2 * kv_heads) * d)).astype(np.float32)
        held["slots"][:m], held["positions"][:m] = zip(*rows, strict=True)
        held["qkv"], held["q"] = qkv, np.zeros((m, heads * d), np.float32)
        held |= rope(**{name: held[name] for name in rope.staged.stages[0].args})
        held["out"] = np.ones((m, heads * d), np.float32)
        held |= attend(**{name: held[name] for name in attend.staged.stages[0].args})
        q, k, value = np.split(qkv.reshape(m, -1, d).astype(np.float64), [heads, heads + kv_heads], axis=1)
        for i, (slot, position) in enumerate(rows):
            if position >= 0:
                seen[slot].append((rotate(norm(k[i], weights[1]), angle[position]), value[i]))
        for i, (slot, position) in enumerate(rows):
            got = held["out"][i].reshape(heads, d)
            if position < 0:
                assert (got == 0).all()
                continue
            keys = np.stack([pair[0] for pair in seen[slot][: position + 1]])
            values = np.stack([pair[1] for pair in seen[slot][: position + 1]])
            for h in range(heads):
                kv = h // (heads // kv_heads)
                scores = keys[:, kv] @ rotate(norm(q[i, h], weights[0]), angle[position]) * a.scale
                p = np.exp(scores - scores.max())
                tolerance = 1e-5 if kv_dtype == "float32" else 4e-3
                np.testing.assert_allclose(
                    got[h], p @ values[:, kv] / p.sum(), atol=tolerance, err_msg=f"step {step} row {i}"
                )


@pytest.mark.parametrize("vocab", [512, 515])
def test_greedy(tmp_path, vocab):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((16, vocab)).astype(np.float32)
    logits[1, [3, 400, vocab - 1]] = 9  # a tie: the lowest index wins
    logits[2, [1, 2]] = [np.nan, 50]
    logits[3, vocab - 1] = 60
    sample_i32 = np.zeros((16, 8), np.int32)
    sample_i32[:, 5] = -1
    sample_i32[2, 5] = 200
    got = Runner(tmp_path, KERNELS.greedy(4, vocab))(
        logits=logits, sample_i32=sample_i32, sampled=np.full(16, -7, np.int32), tokens=np.zeros(256, np.int32)
    )
    assert got["sampled"][:4].tolist() == [int(logits[0].argmax()), 3, 2, vocab - 1]
    assert (got["sampled"][4:] == -7).all()
    assert got["tokens"][200] == 2
    assert np.count_nonzero(got["tokens"]) == 1


def gumbel(seed: tuple[int, int], counter: int, vocab: int) -> np.ndarray:
    """docs/artifact.md's noise, in float64."""
    with np.errstate(over="ignore"):
        words = [np.full(vocab, value, np.uint32) for value in (*seed, counter)] + [np.arange(vocab, dtype=np.uint32)]
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
    x = x / f[0]
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
    (1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1),
    (1.0, 0.3, 0.0, 1.0, 0.0, 0.0, 5000),
]


@pytest.mark.parametrize("vocab", [512, 517])
def test_sample(tmp_path, vocab):
    rng, slots = np.random.default_rng(5), 16
    run = Runner(tmp_path, KERNELS.sample(16, vocab, slots))
    for trial in range(20):
        a = {
            "logits": (rng.standard_normal((16, vocab)) * 3).astype(np.float32),
            "sample_f32": np.zeros((16, 8), np.float32),
            "sample_i32": np.zeros((16, 8), np.int32),
            "logit_bias": np.where(rng.random((slots, vocab)) < 0.1, rng.standard_normal((slots, vocab)), 0).astype(
                np.float32
            ),
            "counts": np.where(rng.random((slots, vocab)) < 0.2, rng.integers(0, 4, (slots, vocab)), 0).astype(
                np.int32
            ),
            "allowed": rng.integers(0, 2**32, (slots, (vocab + 31) // 32), dtype=np.uint64).astype(np.uint32),
            "sampled": np.full(16, -7, np.int32),
            "tokens": np.zeros(256, np.int32),
        }
        a["counts"] |= np.where(rng.random((slots, vocab)) < 0.05, 1 << 24, 0).astype(np.int32)
        a["sample_i32"][:, 0] = rng.permutation(slots)
        for row in range(16):
            setting = SETTINGS[row % len(SETTINGS)]
            a["sample_f32"][row, :6] = setting[:6]
            seed = rng.integers(-(2**31), 2**31, 2)
            a["sample_i32"][row, 1:6] = [setting[6], *seed, trial * 7, row * 2 if row % 2 else -1]
        a["sample_i32"][15, 0] = -1  # unused
        want = [sample_reference(row, a) for row in range(15)]
        got = run(**a)
        assert got["sampled"].tolist() == [*want, -7]
        assert run(**a)["sampled"].tolist() == got["sampled"].tolist()
        counts = a["counts"].copy()
        for row in range(15):
            counts[a["sample_i32"][row, 0], want[row]] += 1
        assert (got["counts"] == counts).all()
        assert [got["tokens"][row * 2] for row in range(1, 15, 2)] == [want[row] for row in range(1, 15, 2)]


def test_sample_follows_the_distribution(tmp_path):
    """Over many counters, frequencies are those of the softmax."""
    vocab = 32
    logits = np.repeat(np.random.default_rng(2).standard_normal((1, vocab)).astype(np.float32), 16, axis=0)
    run = Runner(tmp_path, KERNELS.sample(16, vocab, 16))
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
        np.add.at(hits, run(**a)["sampled"], 1)
    p = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert np.abs(hits / hits.sum() - p).max() < 0.02


@pytest.mark.parametrize("vocab", [512, 517])
def test_logprobs(tmp_path, vocab):
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((16, vocab)) * 4).astype(np.float32)
    logits[1, [7, 3, 500]] = 20  # ties: lowest index first
    sampled = rng.integers(0, vocab, 16).astype(np.int32)
    got = Runner(tmp_path, KERNELS.logprobs(4, vocab))(
        logits=logits, sampled=sampled, logprob=np.zeros(16, np.float32),
        top_ids=np.zeros((16, 20), np.int32), top_logprobs=np.zeros((16, 20), np.float32),
    )  # fmt: skip
    wide = logits.astype(np.float64)
    want = wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)
    for r in range(4):
        order = np.argsort(-wide[r], kind="stable")[:20]
        assert got["top_ids"][r].tolist() == order.tolist()
        np.testing.assert_allclose(got["top_logprobs"][r], want[r, order], atol=1e-5)
        np.testing.assert_allclose(got["logprob"][r], want[r, sampled[r]], atol=1e-5)
