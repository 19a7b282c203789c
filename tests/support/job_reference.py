"""The graph jobs of kernels/jobs/ in NumPy float64, following their docstrings word by word; random inputs
for them.

The code is written for reading, not for speed; kernels of every target are compared with it. It does not know
how matrices are packed or how caches lie in memory: a matrix is `w` float64 [n, k]; caches are [pages,
kv_heads, page_size, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.format.scales import VALUE_BITS
from nearfar.kernels.jobs import (
    Activation,
    Attend,
    Conv,
    Delta,
    Embed,
    Experts,
    GraphJob,
    Linear,
    Norm,
    Paged,
    Project,
    RopeAppend,
    Route,
    Rows,
    Ssm,
)
from nearfar.kernels.quantized import Matrix, QuantPieces, QuantTensor, values_of
from tests.support import quantized_kv

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]


def reference(job: GraphJob, arrays: Arrays) -> dict[str, Array]:
    """Compute a job from its inputs, by name; the matrix is `w`, for Experts `gate_up` and `down`. Nothing is
    written in place.

    `out`: float64; for a linear job with `rows` only its m rows, for Rows unchanged. RopeAppend and Project
    with `append` also give k_cache and v_cache after the job, in their dtype; for a quantized cache the
    values before they become codes.
    """
    return REFERENCES[type(job)](job, arrays)


def embed(job: Embed, a: Arrays) -> Array:
    """See Embed."""
    return job.scale * a["w"][a["tokens"][: job.m]]


def rms_norm(x: Array, eps: float, weight: Array | float = 1.0) -> Array:
    """RMS norm over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def norm(job: Norm, a: Arrays) -> Array:
    """See Norm."""
    x = a["x"].astype(np.float64).reshape(job.m, job.groups, -1)
    weight = a["weight"].reshape(-1, job.k // job.groups) if job.weight else 1.0
    y = rms_norm(x, job.eps, weight).reshape(job.m, job.k)
    return y + a["residual"] if job.residual else y


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def linear(job: Linear, a: Arrays) -> Array:
    """See Linear: norm, matmul, bias, gate, softcap, residual, in this order."""
    x = a["x"].astype(np.float64)
    if job.rows:
        x = x[a["logit_rows"][: job.m]]
    if job.norm is not None:
        x = rms_norm(x, job.norm, a["norm"])
    y = x @ a["w"].T
    if job.bias:
        y = y + a["bias"]
    if job.gate is not None:
        gate, up = np.split(y, 2, axis=1)
        y = ACTIVATIONS[job.gate](gate) * up
    if job.softcap is not None:
        y = job.softcap * np.tanh(y / job.softcap)
    return y + a["residual"] if job.residual else y


def rope_append(job: RopeAppend, a: Arrays) -> dict[str, Array]:
    """See RopeAppend. For rows of padding, q is as for position 0, and has no meaning."""
    facts = rows(Rows.of(job), a)
    return _turned(job, a["x"].astype(np.float64), facts, a)


def rows(job: Rows, a: Arrays) -> Array:
    """See Rows."""
    positions = a["positions"][: job.m]
    out = np.zeros((job.m, job.FACTS + job.head_dim), np.int32)
    out[:, 0] = -1
    if job.append:
        for row in np.flatnonzero(positions >= 0):
            page = a["page_table"][a["slots"][row], positions[row] // job.page_size]
            out[row, 0] = page * job.page_size + positions[row] % job.page_size
    beta, original = job.q_scale or (0.0, 1.0)
    factor = 1 + beta * np.log(1 + np.floor(np.maximum(positions, 0) / original))
    out[:, 1] = factor.astype(np.float32).view(np.int32)
    if job.head_dim:
        out[:, job.FACTS :] = a["rope"][np.maximum(positions, 0)].view(np.int32)
    return out


def project(job: Project, a: Arrays) -> dict[str, Array]:
    """See Project: linear, then everything in RopeAppend, for rows as `rows` describes them."""
    parted = {
        name: a["vectors"][start : start + job.vectors[name]].astype(np.float64)
        for name, start in job.starts.items()
    }
    return _turned(job.paged, linear(job.linear, {**a, **parted}), a["rows"], {**a, **parted})


def _turned(job: RopeAppend, x: Array, facts: Array, a: Arrays) -> dict[str, Array]:
    """Make q, and write k and v to the caches; `facts`: the result of Rows."""
    m = job.m
    heads = np.split(x.reshape(m, job.x_heads, job.head_dim), [job.heads, job.heads + job.kv_heads], axis=1)

    def normed(y: Array, weight: str) -> Array:
        if job.norm_eps is None:
            return y
        if job.norm_all:
            return rms_norm(y.reshape(m, -1), job.norm_eps, a[weight]).reshape(y.shape)
        return rms_norm(y, job.norm_eps, a[weight])

    def rotated(y: Array) -> Array:
        if not job.rope:
            return y
        table = np.ascontiguousarray(facts[:, Rows.FACTS :]).view(np.float32).astype(np.float64)
        cos, sin = np.split(table[:, None], 2, axis=-1)
        low, high = np.split(y, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def turned(y: Array, weight: str) -> Array:
        return normed(rotated(y), weight) if job.norm_after else rotated(normed(y, weight))

    factor = np.ascontiguousarray(facts[:, 1]).view(np.float32).astype(np.float64)
    q = turned(heads[0], "q_norm") * factor[:, None, None]
    out = {"out": q.reshape(m, -1)}
    if not job.append:
        return out
    k, v = turned(heads[1], "k_norm"), heads[2]
    if job.v_norm_eps is not None:
        v = rms_norm(v, job.v_norm_eps)
    if job.rounds_keys:
        k = k - a["k_rounding"].reshape(2, job.kv_heads, -1)[0]
    out |= {"k_cache": a["k_cache"].copy(), "v_cache": a["v_cache"].copy()}
    for row in np.flatnonzero(facts[:, 0] >= 0):
        page, offset = divmod(int(facts[row, 0]), job.page_size)
        most = np.inf if job.kv_dtype == "float32" else 65504  # values that are stored in float16 saturate
        for name, value in (("k_cache", k[row]), ("v_cache", v[row])):
            out[name][page, :, offset] = np.clip(value, -most, most)
    return out


def rounding_weights(job: Paged | Project, a: Arrays) -> Array | None:
    """The weights by which rounding errors of keys move their offsets, as wide as a cache; None where they do
    not.
    """
    paged = job.paged if isinstance(job, Project) else job
    if not isinstance(paged, RopeAppend) or not paged.rounds_keys:
        return None
    held = a["k_rounding"] if isinstance(job, RopeAppend) else a["vectors"][job.starts["k_rounding"] :]
    return held.reshape(2, paged.kv_heads, 1, paged.head_dim)[1]


def attend(job: Attend, a: Arrays) -> Array:
    """See Attend."""
    out = np.zeros((job.m, job.kv_heads, job.heads // job.kv_heads, job.head_dim))
    for row in np.flatnonzero(a["positions"][: job.m] >= 0):
        position = int(a["positions"][row])
        seen = np.arange(0 if job.window is None else max(0, position + 1 - job.window), position + 1)
        pages, offsets = a["page_table"][a["slots"][row], seen // job.page_size], seen % job.page_size
        keys, values = (
            a[f"{part}_cache"][pages, :, offsets].astype(np.float64).swapaxes(0, 1) for part in "kv"
        )
        q = a["q"][row].astype(np.float64).reshape(job.kv_heads, -1, job.head_dim)
        scores = job.scale * (q @ keys.swapaxes(1, 2))
        if job.softcap is not None:
            scores = job.softcap * np.tanh(scores / job.softcap)
        sinks = (
            a["sinks"].astype(np.float64).reshape(job.kv_heads, -1, 1)
            if job.sinks
            else np.full_like(scores[..., :1], -np.inf)
        )
        top = np.maximum(scores.max(-1, keepdims=True), sinks)
        weights = np.exp(scores - top)
        out[row] = weights / (weights.sum(-1, keepdims=True) + np.exp(sinks - top)) @ values
    return out.reshape(job.m, -1)


def conv(job: Conv, a: Arrays) -> dict[str, Array]:
    """See Conv."""
    x, cache, out = a["x"].astype(np.float64), a["cache"].astype(np.float64), np.zeros((job.m, job.width))
    weight = a["weight"].astype(np.float64).reshape(job.width, job.taps)
    for row in np.flatnonzero(a["positions"][: job.m] >= 0):
        table, position = a["page_table"][a["slots"][row]], int(a["positions"][row])
        cache[table[position // job.page_size], 0, position % job.page_size] = x[row]
        total = a["bias"].astype(np.float64) if job.bias else np.zeros(job.width)
        for tap, there in enumerate(range(position - job.taps + 1, position + 1)):
            if there >= 0:
                total = (
                    total + weight[:, tap] * cache[table[there // job.page_size], 0, there % job.page_size]
                )
        out[row] = total if job.activation is None else ACTIVATIONS[job.activation](total)
    return {"out": out, "cache": cache}


def delta(job: Delta, a: Arrays) -> dict[str, Array]:
    """See Delta."""
    x, state, keys = a["x"].astype(np.float64), a["state"].astype(np.float64), job.key_heads * job.key_dim
    out, shared = np.zeros((job.m, job.heads, job.value_dim)), [job.key_head(h) for h in range(job.heads)]
    gates, a_log, dt_bias = (a[name].astype(np.float64) for name in ("gates", "a_log", "dt_bias"))
    for row in np.flatnonzero(a["positions"][: job.m] >= 0):
        table, position = a["page_table"][a["slots"][row]], int(a["positions"][row])
        before = state[table[(position - 1) // job.stride]] if position else np.zeros(state.shape[1:])
        q, k = (x[row, first : first + keys].reshape(job.key_heads, -1)[shared] for first in (0, keys))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + job.eps) for part in (q, k))
        value, (by, rate) = x[row, 2 * keys :].reshape(job.heads, -1), gates[row].reshape(2, -1)
        kept = np.exp(-np.exp(a_log) * np.logaddexp(0, by + dt_bias))[:, None, None] * before
        change = (value - np.einsum("hij,hi->hj", kept, k)) / (1 + np.exp(-rate))[:, None]
        after = state[table[position // job.stride]] = kept + k[:, :, None] * change[:, None]
        out[row] = np.einsum("hij,hi->hj", after, q) * job.key_dim**-0.5
    return {"out": out.reshape(job.m, -1), "state": state}


def ssm(job: Ssm, a: Arrays) -> dict[str, Array]:
    """See Ssm."""
    x, state, dt = (a[name].astype(np.float64) for name in ("x", "state", "dt"))
    inner, shape = job.heads * job.head_dim, (job.groups, job.depth)
    a_log, dt_bias, skip = a["terms"].astype(np.float64).reshape(3, -1)
    out = np.zeros((job.m, job.heads, job.head_dim))
    for row in np.flatnonzero(a["positions"][: job.m] >= 0):
        table, position = a["page_table"][a["slots"][row]], int(a["positions"][row])
        before = state[table[(position - 1) // job.stride]] if position else np.zeros(state.shape[1:])
        value = x[row, :inner].reshape(job.heads, -1)
        b, c = (
            np.repeat(part.reshape(shape), job.heads // job.groups, 0) for part in np.split(x[row, inner:], 2)
        )
        step = np.clip(np.logaddexp(0, dt[row] + dt_bias), job.least, job.most)
        kept = np.exp(-np.exp(a_log) * step)[:, None, None] * before
        after = state[table[position // job.stride]] = kept + b[:, :, None] * (step[:, None] * value)[:, None]
        out[row] = np.einsum("hij,hi->hj", after, c) + skip[:, None] * value
    return {"out": out.reshape(job.m, -1), "state": state}


def state_inputs(job: Conv | Delta | Ssm, rng: np.random.Generator, pages: int = 12) -> dict[str, Array]:
    """Random inputs of a job: the rows of two sequences and of a third with one row, then padding.

    The first sequence begins at 0 or, where there are few rows, behind a page border; the second begins
    before one.
    """
    size = job.page_size if isinstance(job, Conv) else job.stride
    width = job.width if isinstance(job, Conv) else job.x_width
    counts = (job.m,) if job.m == 1 else (job.m // 2, job.m // 4, 1)
    starts = (size, 2 * size - 1, 1) if job.m < 16 else (0, size - 2, 1)
    positions, slots = np.full(256, -1, np.int32), np.zeros(256, np.int32)
    row = 0
    for slot, (count, start) in enumerate(zip(counts, starts, strict=False)):
        positions[row : row + count], slots[row : row + count] = np.arange(start, start + count), slot
        row += count
    table = np.full((job.slots, job.pages_per_slot), -1, np.int32)
    table[:3] = np.resize(rng.permutation(pages), (3, job.pages_per_slot))

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    out: dict[str, Array] = {
        "x": normal(job.m, width),
        "positions": positions,
        "slots": slots,
        "page_table": table,
    }
    if isinstance(job, Conv):
        out |= {"weight": normal(width * job.taps), "cache": normal(pages, 1, size, width)}
        return out | ({"bias": normal(width)} if job.bias else {})
    if isinstance(job, Ssm):
        terms = np.concatenate([normal(job.heads) - 1, normal(2 * job.heads)])
        state = normal(pages, job.heads, job.depth, job.head_dim)
        return out | {"dt": 3 * normal(job.m, job.heads) - 3, "terms": terms, "state": state}
    out |= {
        "gates": 2 * normal(job.m, 2 * job.heads),
        "state": normal(pages, job.heads, job.key_dim, job.value_dim),
    }
    return out | {"a_log": normal(job.heads) - 1, "dt_bias": normal(job.heads)}


def route(job: Route, a: Arrays) -> Array:
    """See Route."""
    x = a["x"].astype(np.float64)
    power = np.exp(x - x.max(-1, keepdims=True))
    scores = 1 / (1 + np.exp(-x)) if job.score == "sigmoid" else power / power.sum(-1, keepdims=True)
    keys = scores + a["bias"] if job.bias else scores
    chosen = np.argsort(-keys, axis=-1, kind="stable")[:, : job.top]
    weights = np.take_along_axis(scores, chosen, -1)
    if job.normalize is not None:
        weights = weights / (weights.sum(-1, keepdims=True) + job.normalize)
    weights = weights * job.scale * (a["factors"][chosen] if job.factors else 1)
    out = np.concatenate([chosen, weights], -1)
    padding = a["positions"][: job.m] < 0
    out[padding] = [-1.0] * job.top + [0.0] * job.top
    return out


def experts(job: Experts, a: Arrays) -> Array:
    """See Experts."""
    x, out = a["x"].astype(np.float64), np.zeros((job.m, job.n))
    stacks = [a[name].reshape(job.experts, -1, a[name].shape[1]) for name in ("gate_up", "down")]
    biases = [
        a[name].reshape(job.experts, -1) if name in a else np.zeros((job.experts, 1))
        for name in ("gate_up_bias", "down_bias")
    ]
    for row in range(job.m):
        for j in range(job.top):
            expert, weight = int(a["route"][row, j]), float(a["route"][row, j + job.top])
            if expert < 0:
                continue
            first = stacks[0][expert] @ x[row] + biases[0][expert]
            gate, up = np.split(first, 2) if job.gated else (first, np.ones(1))
            if job.clamp is None:
                hidden = ACTIVATIONS[job.activation](gate) * up
            else:
                alpha, limit = job.clamp
                gate = np.minimum(gate, limit)
                hidden = (np.clip(up, -limit, limit) + 1) * gate / (1 + np.exp(-alpha * gate))
            out[row] += weight * (stacks[1][expert] @ hidden + biases[1][expert])
    return out


PLAIN = ("w", "gate_up", "down")
"""Names of matrices as numbers; kernels get these packed."""


def matrices_of(job: GraphJob) -> dict[str, Matrix]:
    """The matrices of a job, by their names in the reference."""
    if isinstance(job, Experts):
        return {"gate_up": job.gate_up, "down": job.down}
    return {"w": job.matrix} if isinstance(job, Embed | Linear) else {}


def random_matrix(
    rng: np.random.Generator, matrix: Matrix
) -> tuple[QuantTensor | QuantPieces | Array, Array]:
    """A random input of Kernels.pack, and its numbers in float64 [n, k]: products with unit rows
    are about 1.
    """
    if matrix.pieces:
        pairs = [random_quantized(rng, piece) for piece in matrix.pieces]
        return QuantPieces(tuple(rows for rows, _ in pairs)), np.concatenate([plain for _, plain in pairs])
    if not matrix.quantized:
        dense = rng.standard_normal((matrix.n, matrix.k)) / np.sqrt(matrix.k)
        dense = dense.astype(np.float16 if matrix.bits == 16 else np.float32)
        return dense, dense.astype(np.float64)
    return random_quantized(rng, matrix)


def random_quantized(rng: np.random.Generator, matrix: Matrix) -> tuple[QuantTensor, Array]:
    """A quantized matrix without pieces, and its numbers, computed as the docstring of Scales says."""
    shape, levels, how = (matrix.n, matrix.k // matrix.group), 2**matrix.bits, matrix.scales
    codes = rng.integers(0, levels, (matrix.n, matrix.k)).astype(np.uint8)
    size = 1 / (2**VALUE_BITS if how.table else levels) / np.sqrt(matrix.k)
    units = None
    if how.superblock:
        units = np.zeros((matrix.n, matrix.k // how.superblock, 2), np.float16)
        random = rng.random((*units.shape[:2], how.values))
        units[..., : how.values] = (2 + 2 * random) * size * 4 / 2**how.bits
        units[..., 1] *= levels / 2
        scales, biases = (rng.integers(0, 2**how.bits, shape).astype(np.uint8) for _ in range(2))
        biases *= how.offsets
        of = np.repeat(units.astype(np.float64), shape[1] // units.shape[1], axis=1)
        wide_scales = of[..., 0] * (scales.astype(np.float64) - how.centre)
        wide_biases = -of[..., 1] * biases if how.offsets else -wide_scales * matrix.zero
    else:
        scales = ((2 + 2 * rng.random(shape)) * size).astype(np.float16)
        biases = (scales * (-levels / 2 + rng.random(shape))).astype(np.float16)
        wide_scales = scales.astype(np.float64)
        wide_biases = biases.astype(np.float64) if how.offsets else -wide_scales * matrix.zero
    values = values_of(codes, how).reshape(*shape, matrix.group)
    wide = values * wide_scales[..., None] + wide_biases[..., None]
    return QuantTensor.of_codes(codes, scales, biases, matrix.bits, units), wide.reshape(matrix.n, matrix.k)


def random_inputs(
    job: GraphJob, rng: np.random.Generator, pages: int = 0, context: int = 0
) -> dict[str, Array]:
    """Random arrays for all inputs except the matrix; the test sets those that hold places.

    For a paged job: `pages` in the cache and rows of padding only, page numbers in random order, `context`
    rows of the rotary table.
    """
    half = job.head_dim // 2 if isinstance(job, Paged) else 0

    def normal(dtype: str, *shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    def weights(*shape: int) -> Array:
        return rng.random(shape, np.float32) + np.float32(0.5)

    def norms(heads: int) -> Array:
        return weights(job.head_dim * (heads if job.norm_all else 1))

    def x() -> Array:
        match job:
            case Linear():
                made = normal(job.x_dtype, job.x_rows if job.rows else job.m, job.matrix.k)
            case Norm() | Experts():
                made = normal("float32", job.m, job.k)
            case Route():
                return normal("float32", job.m, job.experts)
            case _:
                made = normal(job.dtype, job.m, job.x_heads * job.head_dim)
        made[0, 3] = 40  # an outlier, as models have them
        return made

    def table() -> Array:
        angles = np.arange(context)[:, None] * 10000.0 ** (-np.arange(half) / half)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    def k_rounding() -> Array:
        """Weights within ±1/4: an offset moves by about a quarter of a step."""
        size = job.kv_heads * job.head_dim
        each = rng.standard_normal(size), rng.uniform(-0.25, 0.25, size)
        return np.concatenate(each).astype(np.float32)

    def cache() -> Array:
        shape = (pages, job.kv_heads, job.page_size, job.head_dim)
        return quantized_kv.rounded(rng.standard_normal(shape), job.kv_dtype)

    def chosen() -> Array:
        """Distinct experts with weights that add up to 1; of several rows the last but one is padding."""
        numbers = np.stack([rng.permutation(job.experts)[: job.top] for _ in range(job.m)])
        parts = rng.random((job.m, job.top)) + 0.1
        made = np.concatenate([numbers, parts / parts.sum(-1, keepdims=True)], -1).astype(np.float32)
        made[-2 : -1 if job.m > 1 else -2] = [-1.0] * job.top + [0.0] * job.top
        return made

    def bias() -> Array:
        return normal("float32", job.experts if isinstance(job, Route) else job.matrix.n)

    makers: dict[str, Callable[[], Array]] = {
        "x": x, "tokens": lambda: rng.integers(0, job.matrix.n, 256).astype(np.int32),
        "logit_rows": lambda: rng.integers(0, job.x_rows, 16).astype(np.int32),
        "norm": lambda: weights(job.matrix.k),
        "weight": lambda: weights(job.k // (1 if job.each else job.groups)),
        "bias": bias, "route": chosen,
        "gate_up_bias": lambda: normal("float32", job.gate_up.n),
        "down_bias": lambda: normal("float32", job.down.n),
        "residual": lambda: normal(job.out[1], job.m, job.out[0][1]),
        "q": lambda: normal(job.dtype, *job.q_shape), "rope": table, "k_cache": cache, "v_cache": cache,
        "q_norm": lambda: norms(job.heads), "k_norm": lambda: norms(job.kv_heads),
        "factors": lambda: weights(job.experts),
        "k_rounding": k_rounding, "sinks": lambda: normal("float32", job.heads),
        "positions": lambda: np.full(256, -1, np.int32), "slots": lambda: np.zeros(256, np.int32),
        "page_table": lambda: np.resize(rng.permutation(pages), (job.slots, job.pages_per_slot)).astype("i4"),
    }  # fmt: skip
    return {name: makers[name]() for name in job.inputs(0)}


def _alone(computed: Callable[[Any, Arrays], Array]) -> Callable[[Any, Arrays], dict[str, Array]]:
    """The reference of a job whose only result is its output."""
    return lambda job, arrays: {"out": computed(job, arrays)}


REFERENCES: Mapping[type[GraphJob], Callable[[Any, Arrays], dict[str, Array]]] = {
    Embed: _alone(embed),
    Norm: _alone(norm),
    Linear: _alone(linear),
    RopeAppend: rope_append,
    Rows: _alone(rows),
    Project: project,
    Attend: _alone(attend),
    Conv: conv,
    Delta: delta,
    Ssm: ssm,
    Route: _alone(route),
    Experts: _alone(experts),
}
