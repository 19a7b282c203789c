"""The operations of a step as nodes of an ONNX graph: one function for each, and the table of them.

A function adds its nodes to the graph and returns the name of the operation's result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nearfar.step import ops
from nearfar.step.operation import Activation, Op
from nearfar.targets.onnx.graph import MICROSOFT, Graph
from nearfar.targets.onnx.step_graph import StepGraph

ROTARY_HEADS = 16
"""GroupQueryAttention rotates heads whose length is a multiple of this number; other heads are rotated before
it.
"""
LAST = np.iinfo(np.int64).max


def embed(g: StepGraph, op: ops.Embed) -> str:
    rows = g.products.rows(g.ids, op.table)
    return g.times(rows, op.scale)


def norm(g: StepGraph, op: ops.Norm) -> str:
    x = g.values[op.x]
    weight, groups = g.vector(op.weight), op.groups if op.groups > 1 else None
    if not op.each:
        return g.rms(x, weight, op.eps, groups)
    return g.graph.node("Mul", g.rms(x, None, op.eps, groups), weight)


def linear(g: StepGraph, op: ops.Linear) -> str:
    return g.products.product(g.values[op.x], op.weight, op.bias and g.vector(op.bias))


def rope_append(g: StepGraph, op: ops.RopeAppend) -> str:
    """Norms and, if the attention cannot rotate, rotation; keys and values wait for their attention."""
    graph, cache = g.graph, g.step.caches[op.cache]
    x, dim = g.values[op.x], cache.head_dim
    if not op.append:
        q = _prepared(g, x, op, op.heads, op.q_norm, True)
        g.projected[op.out] = (q, op)
        return q
    widths = [op.heads * dim, cache.kv_heads * dim, cache.kv_heads * dim]
    q, k, v = graph.nodes("Split", 3, x, graph.constant(widths, "int64"), axis=-1)
    q = _prepared(g, q, op, op.heads, op.q_norm, True)
    k = _prepared(g, k, op, cache.kv_heads, op.k_norm, False)
    if op.v_norm is not None:
        v = g.rms(v, None, op.v_norm, cache.kv_heads)
    g.projected[op.out] = (q, op)
    g.new[op.cache] = (k, v)
    return q


def attend(g: StepGraph, op: ops.Attend) -> str:
    graph, cache = g.graph, g.step.caches[op.cache]
    q, made = g.projected[op.x]
    inputs = [q, *g.new[op.cache], *g.past[op.cache], g.lengths, g.total]
    flags: dict[str, float] = {"scale": op.scale}
    if _inside(g, made):
        inputs += [g.table(str(made.rope), part) for part in ("cos", "sin")]
        flags |= {"do_rotary": 1}
    if op.sinks is not None:
        inputs += [""] * (11 - len(inputs)) + [g.vector(op.sinks)]
    flags |= {"local_window_size": op.window} if op.window is not None else {}
    flags |= {"softcap": op.softcap} if op.softcap is not None else {}
    out, k, v = graph.nodes(
        "GroupQueryAttention",
        3,
        *inputs,
        domain=MICROSOFT,
        num_heads=op.heads,
        kv_num_heads=cache.kv_heads,
        **flags,
    )
    g.appended.setdefault(op.cache, (k, v))
    return out


def glu(g: StepGraph, op: ops.Glu) -> str:
    gate, up = g.graph.nodes("Split", 2, g.values[op.x], axis=-1, num_outputs=2)
    return g.graph.node("Mul", ACTIVATIONS[op.activation](g.graph, gate), up)


def act(g: StepGraph, op: ops.Act) -> str:
    return ACTIVATIONS[op.activation](g.graph, g.values[op.x])


def add(g: StepGraph, op: ops.Add) -> str:
    return g.times(g.graph.node("Add", g.values[op.a], g.values[op.b]), op.scale)


def mul(g: StepGraph, op: ops.Mul) -> str:
    return g.graph.node("Mul", g.values[op.a], g.values[op.b])


def scale(g: StepGraph, op: ops.Scale) -> str:
    x = g.times(g.values[op.x], op.factor)
    return x if op.weight is None else g.graph.node("Mul", x, g.vector(op.weight))


def columns(g: StepGraph, op: ops.Columns) -> str:
    return g.slice(g.values[op.x], op.start, op.start + op.count)


def logits(g: StepGraph, op: ops.Logits) -> str:
    graph = g.graph
    start = graph.node("Reshape", graph.node("Neg", g.kept), graph.constant([1], "int64"))
    ends, axis = graph.constant([LAST], "int64"), graph.constant([1], "int64")
    rows = graph.node("Slice", g.values[op.x], start, ends, axis)
    out = g.products.product(rows, op.weight, op.bias and g.vector(op.bias))
    if op.softcap is None:
        return out
    cap = graph.constant(op.softcap, "float32")
    return graph.node("Mul", graph.node("Tanh", graph.node("Div", out, cap)), cap)


ACTIVATIONS: Mapping[Activation, Callable[[Graph, str], str]] = {
    "silu": lambda graph, x: graph.node("Mul", x, graph.node("Sigmoid", x)),
    "gelu_tanh": lambda graph, x: graph.node("Gelu", x, approximate="tanh"),
    "gelu_erf": lambda graph, x: graph.node("Gelu", x),
    "relu2": lambda graph, x: _squared(graph, graph.node("Relu", x)),
    "sigmoid": lambda graph, x: graph.node("Sigmoid", x),
}
OPERATIONS: Mapping[type[Op], Callable[[StepGraph, Any], str]] = {
    ops.Embed: embed,
    ops.Norm: norm,
    ops.Linear: linear,
    ops.RopeAppend: rope_append,
    ops.Attend: attend,
    ops.Glu: glu,
    ops.Act: act,
    ops.Add: add,
    ops.Mul: mul,
    ops.Scale: scale,
    ops.Columns: columns,
    ops.Logits: logits,
}
NO_EXPERTS = "has no experts: ONNX Runtime's operators for them take other weights. Build for another target"
REFUSED: Mapping[type[Op], str] = {
    ops.Embedding: "is for models that give logits: build embeddings for another target, or leave "
    "--embeddings out",
    ops.Conv: "has no short convolutions: its graph keeps keys and values only. Build for another target",
    ops.Delta: "has no recurrent states: its graph keeps keys and values only. Build for another target",
    ops.Ssm: "has no recurrent states: its graph keeps keys and values only. Build for cpu or wasm",
    ops.Route: NO_EXPERTS,
    ops.Experts: NO_EXPERTS,
}
"""Operations that a graph cannot have, with the target's reason."""


def _squared(graph: Graph, x: str) -> str:
    return graph.node("Mul", x, x)


def _prepared(g: StepGraph, x: str, op: ops.RopeAppend, heads: int, norm: str | None, query: bool) -> str:
    """Queries or keys [B, L, heads·head_dim], normalized, rotated and scaled in the record's order."""
    groups = None if op.norm_all else heads

    def normed(value: str) -> str:
        return value if norm is None else g.rms(value, g.vector(norm), op.eps, groups)

    x = x if op.norm_after else normed(x)
    if op.rope is not None and not _inside(g, op):
        x = g.rotated(x, op.rope, heads, g.step.caches[op.cache].head_dim)
    x = normed(x) if op.norm_after else x
    return g.grown(x, *op.q_scale) if query and op.q_scale is not None else x


def _inside(g: StepGraph, op: ops.RopeAppend) -> bool:
    """Whether the attention rotates.

    Heads that are normalized afterwards, or read by several layers, are rotated before it; a factor of the
    queries may be on either side.
    """
    fits = g.step.caches[op.cache].head_dim % ROTARY_HEADS == 0
    return op.rope is not None and fits and not op.norm_after and op.cache not in g.shared
