"""The operations of a step as calls of MLX: one function for each, and the table of the functions.

A function adds its calls to the reading and returns the operation's value. Weights are resolved, and choices
of each operation made, when a model is loaded; only the calls run at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from nearfar.edge_runtime.executors.mlx.calls import HEADS, ArrayRef, Arrays, Made, StepContext, Value, whole
from nearfar.edge_runtime.executors.mlx.delta import Gated, gated_delta
from nearfar.edge_runtime.executors.mlx.reading import StepReading
from nearfar.edge_runtime.executors.mlx.ssm import StateSpace, state_space
from nearfar.edge_runtime.executors.mlx.stacks import ExpertPairs
from nearfar.step import ops
from nearfar.step.operation import Op


def embed(r: StepReading, op: ops.Embed) -> Value:
    table, scale = r.weights.matrix(op.table), op.scale

    def embed(made: Made, run: StepContext) -> Arrays:
        rows = table.rows(run.tokens).astype(mx.float32)
        return (rows if scale == 1 else rows * scale,)

    return r.calls.add(embed, table.k)


def norm(r: StepReading, op: ops.Norm) -> Value:
    weight, eps, groups = whole(r.weights.vector(op.weight, mx.float32)), op.eps, op.groups
    x = (r.wide(r.whole(op.x)),)
    if op.each:
        return r.calls.each(x, lambda x, run: _by_groups(x, groups, None, eps) * weight)
    if groups == 1:
        return r.calls.each(x, lambda x, run: mx.fast.rms_norm(x, weight, eps))
    return r.calls.each(x, lambda x, run: _by_groups(x, groups, weight, eps))


def linear(r: StepReading, op: ops.Linear) -> Value:
    product, widths = r.product(op.weight, op.bias)
    at = r.narrow(r.whole(op.x)).at
    return r.calls.add(lambda made, run: product(made[at]), *widths)


def rope_append(r: StepReading, op: ops.RopeAppend) -> Value:
    """Return queries [..., L, heads, head_dim]; append keys and values to the cache."""
    calls, shape = r.calls, r.caches[op.cache]
    keys, head_dim = (shape.kv_heads if op.append else 0), shape.head_dim
    x = tuple(map(r.narrow, r.values[op.x]))
    x = calls.each(x, lambda x, run: mx.unflatten(x, -1, (-1, head_dim)), head_dim)
    turned = calls.cut(x, 0, op.heads + keys)
    if not op.norm_after:
        turned = _head_norms(r, op, keys, turned)
    if (rope := op.rope) is not None:
        turned = calls.each(turned, lambda x, run: run.rotate(rope, x))
    if op.norm_after:
        turned = _head_norms(r, op, keys, turned)
    if op.append:
        _append(r, op, calls.cut(turned, op.heads, keys), calls.cut(x, op.heads + keys, keys))
    queries = (calls.whole(calls.cut(turned, 0, op.heads), HEADS),)
    return queries if op.q_scale is None else calls.each(queries, _grown(*op.q_scale))


def attend(r: StepReading, op: ops.Attend) -> Value:
    sinks = None if op.sinks is None else whole(r.weights.vector(op.sinks, r.do.dtype))
    at, width = r.whole(op.x).at, op.heads * r.caches[op.cache].head_dim
    return r.calls.add(lambda made, run: (run.attend(op, made[at], sinks),), width)


def conv(r: StepReading, op: ops.Conv) -> Value:
    width, cache, taps = r.caches[op.cache].head_dim, op.cache, op.taps
    weight = mx.unflatten(whole(r.weights.vector(op.weight, mx.float32)), 0, (width, taps)).swapaxes(0, 1)
    bias = None if op.bias is None else whole(r.weights.vector(op.bias, mx.float32))
    act = None if op.activation is None else r.do.act(op.activation)
    at = r.wide(r.whole(op.x)).at

    def conv(made: Made, run: StepContext) -> Arrays:
        out = mx.sum(run.before(cache, taps, made[at]) * weight, axis=-2)
        out = out if bias is None else out + bias
        return (out if act is None else act(out),)

    return r.calls.add(conv, width)


def delta(r: StepReading, op: ops.Delta) -> Value:
    state = r.caches[op.state]
    rule = Gated(op.key_heads, state.kv_heads, state.depth, op.eps, op.tiled)
    a_log, dt_bias = (whole(r.weights.vector(name, mx.float32)) for name in (op.a_log, op.dt_bias))
    x, gates = (r.wide(r.whole(name)).at for name in (op.x, op.gates))

    def delta(made: Made, run: StepContext) -> Arrays:
        out = run.recur(op.state, rule.parts(made[x], made[gates], a_log, dt_bias), gated_delta)
        return (mx.flatten(out.swapaxes(0, 1), -2, -1),)

    return r.calls.add(delta, state.kv_heads * state.head_dim)


def ssm(r: StepReading, op: ops.Ssm) -> Value:
    state = r.caches[op.state]
    space = StateSpace(state.kv_heads, op.groups, state.depth, op.least, op.most)
    a_log, dt_bias, skip = mx.split(whole(r.weights.vector(op.terms, mx.float32)), 3)
    skip = skip[:, None, None]
    x, dt = (r.wide(r.whole(name)).at for name in (op.x, op.dt))

    def ssm(made: Made, run: StepContext) -> Arrays:
        parts = space.parts(made[x], made[dt], a_log, dt_bias)
        out = run.recur(op.state, parts, state_space) + skip * parts[2]
        return (mx.flatten(out.swapaxes(0, 1), -2, -1),)

    return r.calls.add(ssm, state.kv_heads * state.head_dim)


def glu(r: StepReading, op: ops.Glu) -> Value:
    x = r.values[op.x]
    half = sum(part.width for part in x) // 2
    gate, up = (r.calls.whole(r.calls.cut(x, start, half)) for start in (0, half))
    return r.both(r.do.glu(op.activation), gate, up)


def act(r: StepReading, op: ops.Act) -> Value:
    act = r.do.act(op.activation)
    return r.calls.each((r.whole(op.x),), lambda x, run: act(x))


def add(r: StepReading, op: ops.Add) -> Value:
    return r.both(r.do.add(op.scale), r.whole(op.a), r.whole(op.b))


def mul(r: StepReading, op: ops.Mul) -> Value:
    return r.both(r.do.mul(), r.whole(op.a), r.whole(op.b))


def scale(r: StepReading, op: ops.Scale) -> Value:
    weight = 1.0 if op.weight is None else whole(r.weights.vector(op.weight, mx.float32))
    times, factor = r.do.mul(), mx.array(op.factor * weight, mx.float32)
    return r.calls.each((r.whole(op.x),), lambda x, run: times(x, factor))


def columns(r: StepReading, op: ops.Columns) -> Value:
    return r.calls.cut(r.values[op.x], op.start, op.count)


def route(r: StepReading, op: ops.Route) -> Value:
    """Return the numbers of the experts [..., L, top], and their weights, float32."""
    at = r.wide(r.whole(op.x)).at
    bias, factors = (
        None if name is None else whole(r.weights.vector(name, mx.float32)) for name in (op.bias, op.factors)
    )

    def route(made: Made, run: StepContext) -> Arrays:
        x = made[at]
        scores = mx.sigmoid(x) if op.score == "sigmoid" else mx.softmax(x, axis=-1)
        keys = scores if bias is None else scores + bias
        chosen = run.columns(mx.argsort(-keys, axis=-1), 0, op.top)
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if op.normalize is not None:
            weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + op.normalize)
        weights = weights * op.scale
        return chosen, weights if factors is None else weights * factors[chosen]

    return r.calls.add(route, op.top, op.top)


def experts(r: StepReading, op: ops.Experts) -> Value:
    first, last = r.weights.stack(op.gate_up), r.weights.stack(op.down)
    biases = [
        None
        if name is None
        else mx.unflatten(whole(r.weights.vector(name, r.do.dtype)), 0, (stack.count, -1))
        for name, stack in ((op.gate_up_bias, first), (op.down_bias, last))
    ]
    glu = r.do.glu(op.activation) if op.clamp is None else r.do.clamped(*op.clamp)
    act = None if op.gated else r.do.act(op.activation)
    wide = r.do.wide or (lambda x: x)
    at, (chosen_at, weights_at) = r.narrow(r.whole(op.x)).at, (part.at for part in r.values[op.route])

    def experts(made: Made, run: StepContext) -> Arrays:
        chosen, weights = made[chosen_at], made[weights_at]
        pairs = ExpertPairs(chosen)
        hidden = first(pairs.rows(made[at]), pairs)
        if biases[0] is not None:
            hidden = hidden + biases[0][pairs.experts]
        hidden = glu(*mx.split(hidden, 2, axis=-1)) if act is None else act(hidden)
        out = last(hidden, pairs)
        if biases[1] is not None:
            out = out + biases[1][pairs.experts]
        out = mx.unflatten(pairs.ordered(wide(out)), 0, chosen.shape)
        return (mx.sum(out * mx.expand_dims(weights, -1), axis=-2),)

    return r.calls.add(experts, last.n)


def logits(r: StepReading, op: ops.Logits) -> Value:
    """The input of the last product: the Interpreter multiplies the wanted rows later."""
    return (r.narrow(r.whole(op.x)),)


def embedding(r: StepReading, op: ops.Embedding) -> Value:
    return (r.whole(op.x),)


OPERATIONS: Mapping[type[Op], Callable[[StepReading, Any], Value]] = {
    ops.Embed: embed,
    ops.Norm: norm,
    ops.Linear: linear,
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


def _append(r: StepReading, op: ops.RopeAppend, keys: Value, values: Value) -> None:
    if (eps := op.v_norm) is not None:
        values = r.calls.each(values, lambda x, run: mx.fast.rms_norm(x, None, eps))
    k, v = (r.calls.whole(value, HEADS).at for value in (keys, values))

    def append(made: Made, run: StepContext) -> Arrays:
        run.append(op.cache, made[k], made[v])
        return ()

    r.calls.add(append)


def _head_norms(r: StepReading, op: ops.RopeAppend, keys: int, x: Value) -> Value:
    """Normalize the queries, and `keys` heads of keys, by the operation's norms."""
    if op.q_norm is None and op.k_norm is None:
        return x
    out: list[ArrayRef] = []
    for start, count, name in ((0, op.heads, op.q_norm), (op.heads, keys, op.k_norm)):
        part = r.calls.cut(x, start, count)
        if count and name is not None:
            weight = whole(r.weights.vector(name, r.do.dtype))
            part = r.calls.each((r.calls.whole(part, HEADS),), _head_norm(op, weight))
        out += part
    return tuple(out)


def _head_norm(op: ops.RopeAppend, weight: mx.array) -> Callable[[mx.array, StepContext], mx.array]:
    """RMS norm of each head, or of all heads as one row."""
    eps = op.eps
    if not op.norm_all:
        return lambda x, run: mx.fast.rms_norm(x, weight, eps)
    return lambda x, run: mx.unflatten(
        mx.fast.rms_norm(mx.flatten(x, -2, -1), weight, eps), -1, (x.shape[-2], -1)
    )


def _grown(beta: float, original: float) -> Callable[[mx.array, StepContext], mx.array]:
    """Multiply queries by 1 + beta·ln(1 + ⌊position/original⌋)."""

    def grown(x: mx.array, run: StepContext) -> mx.array:
        factor = 1 + beta * mx.log1p(mx.floor(run.positions() / original))
        return x * mx.expand_dims(factor, -1).astype(x.dtype)

    return grown


def _by_groups(x: mx.array, groups: int, weight: mx.array | None, eps: float) -> mx.array:
    """RMS norm of each of `groups` equal parts of x [..., width]."""
    return mx.flatten(mx.fast.rms_norm(mx.unflatten(x, -1, (groups, -1)), weight, eps), -2, -1)
