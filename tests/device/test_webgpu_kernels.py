"""Every WebGPU kernel against NumPy, through wgpu (lavapipe on a machine without a GPU)."""

from __future__ import annotations

import numpy as np
import pytest

from nearfar.targets.jobs import Attention, Linear
from nearfar.targets.quantized import Matrix, QuantTensor
from nearfar.targets.webgpu import KERNELS

from . import webgpu_harness as harness

RNG = np.random.default_rng(1)
# Relative to the largest output: float32 sums in another order; float16 stores activations with 11 bits (measured: 9e-7 and 4e-4).
TOLERANCE = {"f32": 2e-5, "f16": 1e-3}


def close(got, want, precision):
    error = np.abs(got.astype(np.float64) - want).max() / max(np.abs(want).max(), 1e-6)
    assert error < TOLERANCE[precision], error


def weights(matrix: Matrix):
    """Random matrix: its plain form for packing and its values."""
    if not matrix.quantized:
        dense = RNG.standard_normal((matrix.n, matrix.k)).astype(np.float16)
        return dense.astype(np.float32), dense.astype(np.float64)
    codes = RNG.integers(0, 1 << matrix.bits, (matrix.n, matrix.k)).astype(np.uint8)
    scales = RNG.uniform(0.01, 0.02, (matrix.n, matrix.k // matrix.group)).astype(np.float16)
    scales *= RNG.choice([-1, 1], scales.shape).astype(np.float16)
    biases = RNG.uniform(-0.2, 0.2, scales.shape).astype(np.float16)
    wide = np.repeat(scales, matrix.group, 1).astype(np.float64), np.repeat(biases, matrix.group, 1).astype(np.float64)
    return QuantTensor.of_codes(codes, scales, biases, matrix.bits), codes * wide[0] + wide[1]


def packed(matrix: Matrix, tensor):
    parts = KERNELS.pack(matrix, tensor)
    for part, array in zip(KERNELS.parts(matrix), parts, strict=True):
        assert (part.shape, part.dtype) == (array.shape, str(array.dtype))
    return {f"w{i}": array for i, array in enumerate(parts)}


def check_linear(job: Linear, precision: str):
    m, n, k = job.m, job.matrix.n, job.matrix.k
    tensor, values = weights(job.matrix)
    arrays = packed(job.matrix, tensor)
    x = RNG.standard_normal((job.x_rows or m, k)).astype(job.x_dtype)
    arrays["x"] = x
    want = x.astype(np.float64)
    if job.rows:
        arrays["logit_rows"] = RNG.integers(0, job.x_rows, 16).astype(np.int32)
        want = want[arrays["logit_rows"][:m]]
    if job.norm is not None:
        arrays["norm"] = RNG.uniform(0.5, 2, k).astype(np.float32)
        want = want / np.sqrt((want**2).mean(1, keepdims=True) + job.norm) * arrays["norm"]
    want = want @ values.T
    if job.bias:
        arrays["bias"] = RNG.standard_normal(n).astype(np.float32)
        want += arrays["bias"]
    if job.gated:
        gate, up = want[:, : n // 2], want[:, n // 2 :]
        want = gate / (1 + np.exp(-gate)) * up
    if job.residual:
        arrays["residual"] = RNG.standard_normal(want.shape).astype(job.out_dtype)
        want += arrays["residual"]
    arrays["out"] = np.full((16 if job.rows else m, want.shape[1]), 7, job.out_dtype)
    out = harness.run(KERNELS.linear(job), precision, arrays)["out"]
    close(out[:m], want, precision)
    assert (out[m:] == 7).all()


MATRICES = {
    "q4g32": Matrix(96, 256, 4, 32),
    "q4g64": Matrix(200, 576, 4, 64),
    "q8g32": Matrix(130, 160, 8, 32),
    "q8g64": Matrix(64, 1536, 8, 64),
    "f32odd": Matrix(86, 172, 32),
    "f16odd": Matrix(64, 171, 16),
    "f16": Matrix(512, 64, 16),
}


@pytest.mark.parametrize(
    ("matrix", "precision"),
    [*((name, "f32") for name in MATRICES), ("q4g64", "f16"), ("q8g32", "f16"), ("f16odd", "f16")],
)
@pytest.mark.parametrize("m", [1, 4, 16, 64])
def test_linear(matrix, m, precision):
    dtype = KERNELS.activation_dtype(precision)
    check_linear(Linear(m, MATRICES[matrix], dtype, dtype), precision)


@pytest.mark.parametrize("precision", ["f32", "f16"])
@pytest.mark.parametrize("variant", ["norm", "bias_residual", "gated", "gated_bias", "rows", "long"])
@pytest.mark.parametrize("m", [1, 4, 64])
def test_linear_variants(variant, m, precision):
    dtype = KERNELS.activation_dtype(precision)
    q4 = MATRICES["q4g64"]
    jobs = {
        "norm": Linear(m, q4, "float32", dtype, norm=1e-5),
        "bias_residual": Linear(m, q4, dtype, "float32", bias=True, residual=True),
        "gated": Linear(m, q4, "float32", dtype, norm=1e-5, gated=True),
        "gated_bias": Linear(m, MATRICES["f32odd"], "float32", dtype, norm=1e-6, gated=True, bias=True),
        "rows": Linear(min(m, 16), Matrix(512, 64, 4, 32), "float32", "float32", norm=1e-5, rows=True, x_rows=m),
        "long": Linear(m, Matrix(40, 8192, 4, 64), "float32", dtype, norm=1e-5),
    }
    check_linear(jobs[variant], precision)


@pytest.mark.parametrize("variant", ["plain", "gated"])
@pytest.mark.parametrize("m", [1, 64])
def test_float16_stores_saturate(m, variant):
    """A product beyond 65,504 is stored as that, not as an infinity, which would make NaN of what follows; a NaN stays one."""
    matrix, gated = Matrix(64, 64, 16), variant == "gated"
    tensor, values = weights(matrix)
    x = RNG.standard_normal((m, 64)).astype(np.float32) * 1e5
    x[0, 3] = np.nan
    columns = 32 if gated else 64
    out = np.zeros((m, columns), np.float16)
    arrays = {**packed(matrix, tensor), "x": x, "out": out}
    got = harness.run(KERNELS.linear(Linear(m, matrix, "float32", "float16", gated=gated)), "f16", arrays)["out"]
    want = x.astype(np.float64) @ values.T
    if gated:
        with np.errstate(over="ignore"):
            want = want[:, :32] / (1 + np.exp(-want[:, :32])) * want[:, 32:]
    assert np.isnan(got[0]).all()
    assert not np.isinf(got).any()
    beyond = np.abs(want[1:]) > 7e4
    assert m == 1 or beyond.mean() > 0.3
    assert (got[1:][beyond] == np.copysign(65504.0, want[1:][beyond])).all()
    inside = np.abs(want[1:]) < 6e4
    assert np.abs(got[1:][inside] - want[1:][inside]).max(initial=0) < 100
    arrays["x"], arrays["out"] = np.full((m, 64), 1e6, np.float32), out
    got = harness.run(KERNELS.linear(Linear(m, matrix, "float32", "float16", gated=gated)), "f16", arrays)["out"]
    assert (np.abs(got) <= 65504).all()
    assert (np.abs(got) == 65504).any()


@pytest.mark.parametrize("matrix", MATRICES)
def test_embed(matrix):
    shape = MATRICES[matrix]
    tensor, values = weights(shape)
    tokens = np.full(256, -1, np.int32)
    tokens[:3] = RNG.integers(0, shape.n, 3)
    arrays = {**packed(shape, tensor), "tokens": tokens, "out": np.zeros((4, shape.k), np.float32)}
    out = harness.run(KERNELS.embed(4, shape), "f32", arrays)["out"]
    close(out[:3], values[tokens[:3]], "f32")
    assert np.isfinite(out).all()


def attention_job(m, heads, kv_heads, head_dim, precision):
    dtype = KERNELS.activation_dtype(precision)
    return Attention(m, heads, kv_heads, head_dim, 16, 4, 20, dtype, dtype, head_dim**-0.5)


def paged(job: Attention, lengths: dict[int, int]):
    """Rows of mixed sequences: the last m tokens split among the slots, one row padding; and a shuffled page table."""
    pages = job.slots * job.pages_per_slot
    table = RNG.permutation(pages).astype(np.int32).reshape(job.slots, job.pages_per_slot)
    positions, slots = np.full(256, -1, np.int32), np.zeros(256, np.int32)
    rows = []
    used = max(job.m - 1, 1)
    for i in range(used):
        slot = list(lengths)[i % len(lengths)]
        rows.append((lengths[slot] - 1 - i // len(lengths), slot))
    for i, (position, slot) in enumerate(rows):
        positions[i], slots[i] = position, slot
    return pages, table, positions, slots, rows


SHAPES = [(1, 8, 4, 8), (4, 9, 3, 64), (16, 4, 2, 128), (64, 8, 8, 16), (1, 32, 2, 64)]


@pytest.mark.parametrize("precision", ["f32", "f16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape, precision):
    job = attention_job(*shape, precision)
    pages, table, positions, slots, rows = paged(job, {2: 311, 0: 70, 3: 129})
    k, v = (RNG.standard_normal((pages, job.kv_heads, 16, job.head_dim)).astype(job.kv_dtype) for _ in "kv")
    q = RNG.standard_normal((job.m, job.heads * job.head_dim)).astype(job.dtype)
    arrays = {"q": q, "k_cache": k, "v_cache": v, "positions": positions, "slots": slots, "page_table": table}
    arrays["out"] = np.full(q.shape, 7, job.dtype)
    out = harness.run(KERNELS.attention(job), precision, arrays)["out"]
    want = np.zeros(q.shape)
    for i, (position, slot) in enumerate(rows):
        keys, values = (
            c[table[slot]]
            .transpose(1, 0, 2, 3)
            .reshape(job.kv_heads, -1, job.head_dim)[:, : position + 1]
            .astype(float)
            for c in (k, v)
        )
        for head in range(job.heads):
            at = head // (job.heads // job.kv_heads)
            score = keys[at] @ q[i].astype(float)[head * job.head_dim : (head + 1) * job.head_dim] * job.scale
            weight = np.exp(score - score.max())
            want[i, head * job.head_dim : (head + 1) * job.head_dim] = weight @ values[at] / weight.sum()
    close(out, want, precision)


@pytest.mark.parametrize("precision", ["f32", "f16"])
@pytest.mark.parametrize("qk_norm", [None, 1e-6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_append(shape, qk_norm, precision):
    job = attention_job(*shape, precision)
    pages, table, positions, slots, rows = paged(job, {2: 311, 0: 70, 3: 129})
    dim, half = job.head_dim, job.head_dim // 2
    angles = np.arange(320)[:, None] * 10000.0 ** -(np.arange(half) / half)
    rope = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    qkv = RNG.standard_normal((job.m, (job.heads + 2 * job.kv_heads) * dim)).astype(job.dtype)
    arrays = {"qkv": qkv, "positions": positions, "slots": slots, "page_table": table, "rope": rope}
    norms = RNG.uniform(0.5, 2, (2, dim)).astype(np.float32)
    if qk_norm is not None:
        arrays |= {"q_norm": norms[0], "k_norm": norms[1]}
    cache = np.full((pages, job.kv_heads, 16, dim), 7, job.kv_dtype)
    arrays |= {"k_cache": cache, "v_cache": cache, "q": np.zeros((job.m, job.heads * dim), job.dtype)}
    got = harness.run(KERNELS.rope_append(job, qk_norm), precision, arrays)
    want_k, want_v = cache.astype(float), cache.astype(float)
    split = qkv.astype(float).reshape(job.m, -1, dim)
    q, k, v = np.split(split, [job.heads, job.heads + job.kv_heads], 1)
    if qk_norm is not None:
        q, k = (x / np.sqrt((x**2).mean(-1, keepdims=True) + qk_norm) * w for x, w in ((q, norms[0]), (k, norms[1])))
    for i, (position, slot) in enumerate(rows):
        c, s = rope[position, :half], rope[position, half:]
        q[i], k[i] = (
            np.concatenate([x[:, :half] * c - x[:, half:] * s, x[:, half:] * c + x[:, :half] * s], 1)
            for x in (q[i], k[i])
        )
        want_k[table[slot, position // 16], :, position % 16] = k[i]
        want_v[table[slot, position // 16], :, position % 16] = v[i]
    close(got["q"][: len(rows)], q.reshape(job.m, -1)[: len(rows)], precision)
    close(got["k_cache"], want_k, precision)
    close(got["v_cache"], want_v, precision)
