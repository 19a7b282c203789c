"""The operations of a step in NumPy: one function each, and the table of them. Formulas as in step/ops.py.

The forward of a calibration (forward.py) and the reference of the tests (tests/support/step_reference.py)
read a list by this table. They differ in where keys and values are kept, which `ForwardRun` abstracts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from nearfar.build.calibration.arithmetic import (
    ACTIVATIONS,
    Array,
    capped,
    linear,
    rms_norm,
    rotate,
    sigmoid,
    unit,
)
from nearfar.step import ops
from nearfar.step.model import Step
from nearfar.step.operation import Op

Update = Callable[[Array, Array], Array]
"""Maps rows [B] and the states before them [B, heads, depth, head_dim] to the states after them."""


class ForwardRun(Protocol):
    """The state of M rows that run through the list of a step."""

    @property
    def step(self) -> Step:
        """The step: its list of operations, its caches and rotations."""
        ...

    @property
    def weights(self) -> Mapping[str, Array]:
        """Parameters by name: [n, k], or [n]."""
        ...

    @property
    def values(self) -> Mapping[str, Array]:
        """The results of the operations so far, [M, width] by name."""
        ...

    @property
    def tokens(self) -> Array:
        """Token ids, int [M]."""
        ...

    @property
    def positions(self) -> Array:
        """Positions, int [M]; below 0 for rows of padding."""
        ...

    def choose(self, stack: str, expert: int, x: Array) -> None:
        """Learn the inputs [rows, k] of one expert of a stack of matrices, before they are multiplied."""
        ...

    def append(self, op: ops.RopeAppend, keys: Array, values: Array) -> None:
        """Keep keys and values [M, kv_heads, head_dim] of the rows."""
        ...

    def attend(self, op: ops.Attend, queries: Array) -> Array:
        """Attention of queries [M, heads, head_dim], as [M, heads·head_dim]."""
        ...

    def before(self, op: ops.Conv, x: Array) -> Array:
        """Keep x [M, width] of the rows, and return it for the last positions of each row, [M, taps, width];
        0 before position 0.
        """
        ...

    def recur(self, cache: int, update: Update) -> None:
        """Call `update` for the rows in the order of positions, and keep the states that it returns."""
        ...

    def wanted(self, x: Array) -> Array:
        """The rows of x whose logits or embeddings are wanted."""
        ...


def compute(run: ForwardRun, op: Op) -> Array:
    """Compute an operation's result, [M, width]."""
    return OPERATIONS[type(op)](run, op)


def embed(run: ForwardRun, op: ops.Embed) -> Array:
    rows = run.weights[op.table][run.tokens]
    return np.asarray(rows * rows.dtype.type(op.scale))


def norm(run: ForwardRun, op: ops.Norm) -> Array:
    x = run.values[op.x]
    weight = run.weights[op.weight].reshape(-1, x.shape[1] // op.groups)
    return rms_norm(x.reshape(len(x), op.groups, -1), weight, op.eps).reshape(x.shape)


def product(run: ForwardRun, op: ops.Linear) -> Array:
    return linear(run.values[op.x], run.weights[op.weight], _bias(run, op.bias))


def rope_append(run: ForwardRun, op: ops.RopeAppend) -> Array:
    x, cache = run.values[op.x], run.step.caches[op.cache]
    widths = op.heads * cache.head_dim, cache.kv_heads * cache.head_dim
    q = _turned(run, op, x[:, : widths[0]], op.q_norm)
    if op.q_scale is not None:
        beta, original = op.q_scale
        growth = np.log1p(np.maximum(run.positions, 0) // original)
        q = q * (1 + beta * growth).astype(q.dtype)[:, None, None]
    if op.append:
        k = _turned(run, op, x[:, widths[0] : sum(widths)], op.k_norm)
        v = x[:, sum(widths) :].reshape(len(x), -1, cache.head_dim)
        if op.v_norm is not None:
            v = rms_norm(v, np.ones(cache.head_dim, x.dtype), op.v_norm)
        run.append(op, k, v)
    return q.reshape(len(x), -1)


def attend(run: ForwardRun, op: ops.Attend) -> Array:
    x = run.values[op.x]
    return run.attend(op, x.reshape(len(x), op.heads, -1))


def conv(run: ForwardRun, op: ops.Conv) -> Array:
    taken = run.before(op, run.values[op.x])
    out = np.einsum("mtw,wt->mw", taken, run.weights[op.weight].reshape(-1, op.taps))
    out = out if op.bias is None else out + run.weights[op.bias]
    return np.asarray(out) if op.activation is None else ACTIVATIONS[op.activation](out)


def delta(run: ForwardRun, op: ops.Delta) -> Array:
    x, state = run.values[op.x], run.step.caches[op.state]
    keys, each = op.key_heads * state.depth, state.kv_heads // op.key_heads
    heads = np.arange(op.key_heads)
    held_by = np.tile(heads, each) if op.tiled else np.repeat(heads, each)
    q, k = (
        unit(part.reshape(len(x), op.key_heads, -1), op.eps)[:, held_by]
        for part in (x[:, :keys], x[:, keys : 2 * keys])
    )
    q, v = q * x.dtype.type(state.depth**-0.5), x[:, 2 * keys :].reshape(len(x), state.kv_heads, -1)
    a, b = np.split(run.values[op.gates], 2, -1)
    decay = np.exp(-np.exp(run.weights[op.a_log]) * np.logaddexp(0, a + run.weights[op.dt_bias]))
    rate, out = sigmoid(b), np.zeros_like(v)

    def update(rows: Array, before: Array) -> Array:
        kept = before * decay[rows][:, :, None, None]
        change = (v[rows] - np.einsum("bhij,bhi->bhj", kept, k[rows])) * rate[rows][:, :, None]
        after = kept + k[rows][..., None] * change[:, :, None]
        out[rows] = np.einsum("bhij,bhi->bhj", after, q[rows])
        return np.asarray(after)

    run.recur(op.state, update)
    return out.reshape(len(x), -1)


def ssm(run: ForwardRun, op: ops.Ssm) -> Array:
    x, state = run.values[op.x], run.step.caches[op.state]
    heads, inner = state.kv_heads, state.kv_heads * state.head_dim
    value = x[:, :inner].reshape(len(x), heads, -1)
    b, c = (
        np.repeat(part.reshape(len(x), op.groups, -1), heads // op.groups, 1)
        for part in np.split(x[:, inner:], 2, -1)
    )
    a_log, dt_bias, skip = run.weights[op.terms].reshape(3, heads)
    dt = np.clip(np.logaddexp(0, run.values[op.dt] + dt_bias), op.least, op.most)
    decay, added, out = np.exp(-np.exp(a_log) * dt), dt[..., None] * value, np.zeros_like(value)

    def update(rows: Array, before: Array) -> Array:
        after = before * decay[rows][:, :, None, None] + b[rows][..., None] * added[rows][:, :, None]
        out[rows] = np.einsum("bhij,bhi->bhj", after, c[rows])
        return np.asarray(after)

    run.recur(op.state, update)
    return np.asarray(out + skip[:, None] * value).reshape(len(x), -1)


def glu(run: ForwardRun, op: ops.Glu) -> Array:
    gate, up = np.split(run.values[op.x], 2, -1)
    return np.asarray(ACTIVATIONS[op.activation](gate) * up)


def act(run: ForwardRun, op: ops.Act) -> Array:
    return ACTIVATIONS[op.activation](run.values[op.x])


def add(run: ForwardRun, op: ops.Add) -> Array:
    both = run.values[op.a] + run.values[op.b]
    return np.asarray(both * both.dtype.type(op.scale))


def mul(run: ForwardRun, op: ops.Mul) -> Array:
    return np.asarray(run.values[op.a] * run.values[op.b])


def scale(run: ForwardRun, op: ops.Scale) -> Array:
    x = run.values[op.x] * run.values[op.x].dtype.type(op.factor)
    return np.asarray(x if op.weight is None else x * run.weights[op.weight])


def columns(run: ForwardRun, op: ops.Columns) -> Array:
    return run.values[op.x][:, op.start : op.start + op.count]


def route(run: ForwardRun, op: ops.Route) -> Array:
    x = run.values[op.x]
    real = x.dtype.type
    if op.score == "sigmoid":
        scores = 1 / (1 + np.exp(-x))
    else:
        powers = np.exp(x - x.max(-1, keepdims=True))
        scores = powers / powers.sum(-1, keepdims=True)
    better = scores if op.bias is None else scores + run.weights[op.bias]
    chosen = np.argsort(-better, axis=-1, kind="stable")[:, : op.top]
    weights = np.take_along_axis(scores, chosen, -1)
    if op.normalize is not None:
        weights = weights / (weights.sum(-1, keepdims=True) + real(op.normalize))
    weights = weights * real(op.scale)
    if op.factors is not None:
        weights = weights * run.weights[op.factors][chosen]
    return np.concatenate([chosen.astype(x.dtype), weights], -1)


def experts(run: ForwardRun, op: ops.Experts) -> Array:
    """Compute expert by expert, with the rows that have chosen the expert."""
    x, top = run.values[op.x], run.values[op.route].shape[1] // 2
    chosen, weights = run.values[op.route][:, :top].astype(np.int64), run.values[op.route][:, top:]
    gate_up, down = run.weights[op.gate_up], run.weights[op.down]
    stack = len(gate_up) // ((1 + op.gated) * down.shape[1])
    first, last = (part.reshape(stack, -1, part.shape[1]) for part in (gate_up, down))
    biases = [None if name is None else run.weights[name].reshape(stack, -1) for name in
              (op.gate_up_bias, op.down_bias)]  # fmt: skip
    out = np.zeros((len(x), last.shape[1]), x.dtype)
    for expert in np.unique(chosen):
        rows, place = np.nonzero(chosen == expert)
        own = [None if bias is None else bias[expert] for bias in biases]
        run.choose(op.gate_up, int(expert), x[rows])
        hidden = hidden_values(op, linear(x[rows], first[expert], own[0]))
        run.choose(op.down, int(expert), hidden)
        made = linear(hidden, last[expert], own[1])
        np.add.at(out, rows, made * weights[rows, place][:, None])
    return out


def hidden_values(op: ops.Experts, x: Array) -> Array:
    """The hidden values of an expert, of its first product."""
    if not op.gated:
        return ACTIVATIONS[op.activation](x)
    gate, up = np.split(x, 2, -1)
    if op.clamp is None:
        return np.asarray(ACTIVATIONS[op.activation](gate) * up)
    alpha, limit = map(gate.dtype.type, op.clamp)
    gate = np.minimum(gate, limit)
    return np.asarray((np.clip(up, -limit, limit) + 1) * (gate / (1 + np.exp(-alpha * gate))))


def logits(run: ForwardRun, op: ops.Logits) -> Array:
    rows = run.wanted(run.values[op.x])
    return capped(linear(rows, run.weights[op.weight], _bias(run, op.bias)), op.softcap)


def embedding(run: ForwardRun, op: ops.Embedding) -> Array:
    return run.wanted(run.values[op.x])


OPERATIONS: Mapping[type[Op], Callable[[Any, Any], Array]] = {
    ops.Embed: embed,
    ops.Norm: norm,
    ops.Linear: product,
    ops.RopeAppend: rope_append,
    ops.Attend: attend,
    ops.Conv: conv,
    ops.Delta: delta,
    ops.Ssm: ssm,
    ops.Glu: glu,
    ops.Act: act,
    ops.Add: add,
    ops.Mul: mul,
    ops.Scale: scale,
    ops.Columns: columns,
    ops.Route: route,
    ops.Experts: experts,
    ops.Logits: logits,
    ops.Embedding: embedding,
}


def attention(
    op: ops.Attend, q: Array, keys: Array, values: Array, sinks: Array | None, seen: Array | None = None
) -> Array:
    """Attention of q [..., kv_heads, heads of each, L, head_dim] over keys and values [..., kv_heads, P,
    head_dim], in q's shape. `sinks` [heads]; `seen` bool [L, P]: which positions a row sees, None: all.
    """
    real = q.dtype.type
    scores = capped(q @ keys[..., None, :, :].swapaxes(-1, -2) * real(op.scale), op.softcap)
    if seen is not None:
        scores += np.where(seen, real(0), real(-np.inf))
    highest = scores.max(-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(keys.shape[-3], -1, 1, 1)
        highest = np.maximum(highest, sinks)
    scores -= highest
    weights = np.exp(scores, out=scores)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - highest)
    return np.asarray(weights @ values[..., None, :, :] / total)


def _bias(run: ForwardRun, name: str | None) -> Array | None:
    return None if name is None else run.weights[name]


def _turned(run: ForwardRun, op: ops.RopeAppend, part: Array, norm: str | None) -> Array:
    """Reshape a projection [M, heads · head_dim] to [M, heads, head_dim], normalized and rotated."""
    heads = part.reshape(len(part), -1, run.step.caches[op.cache].head_dim)

    def normed(heads: Array) -> Array:
        if norm is None:
            return heads
        flat = heads.reshape(len(heads), -1) if op.norm_all else heads
        return rms_norm(flat, run.weights[norm], op.eps).reshape(heads.shape)

    heads = heads if op.norm_after else normed(heads)
    heads = heads if op.rope is None else rotate(heads, run.step.ropes[op.rope], run.positions)
    return normed(heads) if op.norm_after else heads
