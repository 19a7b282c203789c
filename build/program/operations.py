"""The operations of a step in Relax: one function each, and the table of them.

A function gives an operation's result as an expression: a call of one of our operators, whose job selects a
kernel, or Relax's own operators, which TVM fuses and schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax

from nearfar.build.program import operators
from nearfar.build.program.function import StepFunction
from nearfar.format import buffers
from nearfar.format.kv import rounding
from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.kernels import jobs
from nearfar.step import ops
from nearfar.step.operation import Activation, Op


def embed(f: StepFunction, op: ops.Embed) -> relax.Expr:
    job = jobs.Embed(f.m, f.matrices[op.table], op.scale)
    return operators.call(job, [f.buffer("tokens", (MAX_STEP,), "int32"), *f.parts(op.table)])


def norm(f: StepFunction, op: ops.Norm) -> relax.Expr:
    x = f.values[op.x]
    width = int(x.ty.shape.values[1])
    job = jobs.Norm(f.m, width, op.eps, True, op.groups, each=op.each)
    return operators.call(job, [x, f.vector(op.weight)])


def product(f: StepFunction, op: ops.Linear) -> relax.Expr:
    x = f.values[op.x]
    job = jobs.Linear(
        m=f.m,
        matrix=f.matrices[op.weight],
        x_dtype=str(x.ty.dtype),
        out_dtype=f.dtype(op.out),
        bias=op.bias is not None,
        x_rows=f.m,
    )
    return operators.call(job, [x, *f.parts(op.weight), *f.optional(op.bias)])


def rope_append(f: StepFunction, op: ops.RopeAppend) -> relax.Expr:
    job = jobs.RopeAppend(
        **f.paged(op.cache, op.heads),
        rope=op.rope is not None,
        norm_eps=op.eps if op.q_norm is not None else None,
        norm_all=op.norm_all,
        norm_after=op.norm_after,
        v_norm_eps=op.v_norm,
        q_scale=op.q_scale,
        append=op.append,
    )
    have = {"x": f.narrow_value(op.x), **f.where(op.cache), **f.kv(op.cache)}
    if op.rope is not None:
        have["rope"] = f.buffer(buffers.rope(op.rope), (f.symbols["context"], job.head_dim), "float32")
    norms = {
        name: f.vector(weight) for name, weight in (("q_norm", op.q_norm), ("k_norm", op.k_norm)) if weight
    }
    if job.rounds_keys:
        name = rounding(op.cache)
        shape = (2 * job.kv_heads * job.head_dim,)
        have["k_rounding"] = f.input(name, f"weight:{name}", shape, "float32")
    return operators.rebuilt(job, have | norms)


def attend(f: StepFunction, op: ops.Attend) -> relax.Expr:
    job = jobs.Attend(
        **f.paged(op.cache, op.heads), scale=op.scale, window=op.window, softcap=op.softcap,
        sinks=op.sinks is not None,
    )  # fmt: skip
    have = {"q": f.values[op.x], **f.where(op.cache), **f.kv(op.cache)}
    return operators.rebuilt(job, have | ({"sinks": f.vector(op.sinks)} if op.sinks else {}))


def conv(f: StepFunction, op: ops.Conv) -> relax.Expr:
    shape = f.step.caches[op.cache]
    job = jobs.Conv(
        f.m, shape.head_dim, op.taps, **f.geometry(), activation=op.activation, bias=op.bias is not None
    )
    have = {"x": f.wide_value(op.x), "weight": f.vector(op.weight), "cache": f.kept(op.cache)}
    return operators.rebuilt(job, have | f.where(op.cache) | ({"bias": f.vector(op.bias)} if op.bias else {}))


def delta(f: StepFunction, op: ops.Delta) -> relax.Expr:
    shape, where = f.step.caches[op.state], f.geometry()
    assert shape.group.stride is not None
    job = jobs.Delta(
        f.m, shape.kv_heads, op.key_heads, shape.depth, shape.head_dim, shape.group.stride, where["slots"],
        where["pages_per_slot"], op.eps, op.tiled,
    )  # fmt: skip
    have = {"x": f.wide_value(op.x), "gates": f.wide_value(op.gates), "state": f.kept(op.state)}
    vectors = {"a_log": f.vector(op.a_log), "dt_bias": f.vector(op.dt_bias)}
    return operators.rebuilt(job, have | vectors | f.where(op.state))


def ssm(f: StepFunction, op: ops.Ssm) -> relax.Expr:
    shape, where = f.step.caches[op.state], f.geometry()
    assert shape.group.stride is not None
    job = jobs.Ssm(
        f.m, shape.kv_heads, op.groups, shape.depth, shape.head_dim, shape.group.stride, where["slots"],
        where["pages_per_slot"], op.least, op.most,
    )  # fmt: skip
    have = {"x": f.wide_value(op.x), "dt": f.wide_value(op.dt), "state": f.kept(op.state)}
    return operators.rebuilt(job, have | {"terms": f.vector(op.terms)} | f.where(op.state))


def glu(f: StepFunction, op: ops.Glu) -> relax.Expr:
    gate, up = f.split(f.values[op.x])
    return relax.op.multiply(
        f.bind(ACTIVATIONS[op.activation](f, f.bind(gate, "gate")), "act"),
        f.bind(up, "up"),
    )


def act(f: StepFunction, op: ops.Act) -> relax.Expr:
    return ACTIVATIONS[op.activation](f, f.values[op.x])


def add(f: StepFunction, op: ops.Add) -> relax.Expr:
    both = relax.op.add(f.wide_value(op.a), f.wide_value(op.b))
    return (
        both if op.scale == 1.0 else relax.op.multiply(f.bind(both, "sum"), relax.const(op.scale, "float32"))
    )


def mul(f: StepFunction, op: ops.Mul) -> relax.Expr:
    return relax.op.multiply(f.wide_value(op.a), f.wide_value(op.b))


def scale(f: StepFunction, op: ops.Scale) -> relax.Expr:
    x = f.wide_value(op.x)
    if op.factor != 1.0:
        x = f.bind(relax.op.multiply(x, relax.const(op.factor, "float32")), "scaled")
    return x if op.weight is None else relax.op.multiply(x, f.vector(op.weight))


def columns(f: StepFunction, op: ops.Columns) -> relax.Expr:
    return relax.op.strided_slice(f.values[op.x], [1], [op.start], [op.start + op.count])


def route(f: StepFunction, op: ops.Route) -> relax.Expr:
    x = f.values[op.x]
    job = jobs.Route(
        f.m, int(x.ty.shape.values[1]), op.top, op.score, op.normalize, op.bias is not None, op.scale,
        op.factors is not None,
    )  # fmt: skip
    vectors = [*f.optional(op.bias), *f.optional(op.factors)]
    return operators.call(job, [x, f.buffer("positions", (MAX_STEP,), "int32"), *vectors])


def experts(f: StepFunction, op: ops.Experts) -> relax.Expr:
    route = f.values[op.route]
    job = jobs.Experts(
        f.m, f.matrices[op.gate_up], f.matrices[op.down], int(route.ty.shape.values[1]) // 2, op.activation,
        op.gate_up_bias is not None, op.down_bias is not None, op.clamp,
    )  # fmt: skip
    biases = [*f.optional(op.gate_up_bias), *f.optional(op.down_bias)]
    return operators.call(job, [f.values[op.x], route, *f.parts(op.gate_up), *f.parts(op.down), *biases])


def logits(f: StepFunction, op: ops.Logits) -> relax.Expr:
    job = jobs.Linear(
        m=min(f.m, MAX_ROWS),
        matrix=f.matrices[op.weight],
        x_dtype="float32",
        out_dtype="float32",
        bias=op.bias is not None,
        rows=True,
        x_rows=f.m,
        softcap=op.softcap,
    )
    rows = f.buffer("logit_rows", (MAX_ROWS,), "int32")
    return operators.call(job, [f.values[op.x], rows, *f.parts(op.weight), *f.optional(op.bias)])


def embedding(f: StepFunction, op: ops.Embedding) -> relax.Expr:
    rows = f.buffer("logit_rows", (MAX_ROWS,), "int32")
    return relax.op.take(f.wide_value(op.x), rows, axis=0, mode="clip")


ACTIVATIONS: Mapping[Activation, Callable[[StepFunction, relax.Var], relax.Expr]] = {
    "silu": lambda f, x: relax.op.nn.silu(x),
    "gelu_tanh": lambda f, x: relax.op.nn.gelu_tanh(x),
    "gelu_erf": lambda f, x: relax.op.nn.gelu(x),
    "sigmoid": lambda f, x: relax.op.sigmoid(x),
    "relu2": lambda f, x: relax.op.square(f.bind(relax.op.nn.relu(x), "relu")),
}
OPERATIONS: Mapping[type[Op], Callable[[StepFunction, Any], relax.Expr]] = {
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
