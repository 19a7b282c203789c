"""The step's list as an ONNX graph: a function of B sequences of L tokens with their past, in any step.

Inputs and outputs are those that Transformers.js and onnxruntime-genai know:

    input_ids int64 [B, L]; attention_mask int64 [B, T], T = past + L: 1 where a token is
    past_key_values.<c>.key, .value float32 [B, kv_heads, past, head_dim] of cache c
    num_logits_to_keep int64 []: logits of so many last tokens, 0 (as when it is left out): of all
    logits float32 [B, L or so many, vocab]; present.<c>.key, .value, with L positions more

Sequences of different lengths stand at the left: what the mask leaves out lies behind them, as
GroupQueryAttention wants it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nearfar.format.rotations import rope_table
from nearfar.kernels.quantized import Matrix
from nearfar.step import ops
from nearfar.step.model import Model
from nearfar.step.ops import Op
from nearfar.targets.onnx.external import ExternalWriter, Placed
from nearfar.targets.onnx.graph import MICROSOFT, Extents, Graph
from nearfar.targets.onnx.matrices import Products

ROTARY_HEADS = 16
"""GroupQueryAttention rotates heads whose length is a multiple of this; others are rotated before it."""
LAST = np.iinfo(np.int64).max


def write_tables(files: ExternalWriter, model: Model) -> dict[str, Placed]:
    """Cosines and sines of each rotation by position, float32 [context, head_dim/2] each."""
    placed = {}
    for name, rope in model.step.ropes.items():
        table = rope_table(np.array(rope.inv_freq, np.float32), rope.scale, model.context_length)
        for part, values in zip(("cos", "sin"), np.split(table, 2, axis=1), strict=True):
            placed[f"rope.{name}.{part}"] = files.add(f"rope.{name}.{part}", values)
    return placed


class Lowering:
    """Reads the list: each operation becomes a few nodes."""

    def __init__(
        self,
        model: Model,
        matrices: Mapping[str, Matrix],
        placed: Mapping[str, Mapping[str, Placed]],
        single: Mapping[str, Placed],
        int8: bool,
    ) -> None:
        """`placed`: the arrays of each matrix; `single`: vectors and tables of rotations by name."""
        self._model, self._step, self._single = model, model.step, single
        self._graph = Graph(model.architecture)
        self._products = Products(self._graph, matrices, placed, int8)
        self._values: dict[str, str] = {}
        self._projected: dict[str, tuple[str, ops.RopeAppend]] = {}
        self._shared = _shared_caches(model)
        self._appended: dict[int, tuple[str, str]] = {}
        self._past: dict[int, tuple[str, str]] = {}
        self._new: dict[int, tuple[str, str]] = {}
        self._turned: dict[str, tuple[str, str]] = {}
        self._inputs()

    def graph(self) -> Graph:
        """The whole graph."""
        for op in self._step.ops:
            self._values[op.out] = getattr(self, f"_{op.op}")(op)
        vocab = self._model.vocab_size
        self._graph.output(self._values[self._step.ops[-1].out], "logits", ["batch_size", "kept", vocab])
        for index, cache in enumerate(self._step.caches):
            shape: Extents = ["batch_size", cache.kv_heads, "total_sequence_length", cache.head_dim]
            for part, value in zip(("key", "value"), self._appended[index], strict=True):
                self._graph.output(value, f"present.{index}.{part}", shape)
        return self._graph

    def _inputs(self) -> None:
        """The inputs, and what every attention reads of them."""
        graph = self._graph
        self._ids = graph.input("input_ids", "int64", ["batch_size", "sequence_length"])
        mask = graph.input("attention_mask", "int64", ["batch_size", "total_sequence_length"])
        for index, cache in enumerate(self._step.caches):
            shape: Extents = ["batch_size", cache.kv_heads, "past_sequence_length", cache.head_dim]
            self._past[index] = (
                graph.input(f"past_key_values.{index}.key", "float32", shape),
                graph.input(f"past_key_values.{index}.value", "float32", shape),
            )
        self._kept = graph.input("num_logits_to_keep", "int64", [], default=0)
        one = graph.constant([1], "int64")
        seen = graph.node("ReduceSum", mask, one, keepdims=1)  # [B, 1]
        lengths = graph.node("Sub", graph.node("ReduceSum", mask, one, keepdims=0), one)
        self._lengths = graph.node("Cast", lengths, to=6)
        total = graph.node("Gather", graph.node("Shape", mask), graph.constant(1, "int64"))
        self._total = graph.node("Cast", total, to=6)
        count = graph.node("Gather", graph.node("Shape", self._ids), graph.constant(1, "int64"))
        start = graph.node("Max", graph.node("Sub", seen, count), graph.constant([[0]], "int64"))
        zero, step = graph.constant(0, "int64"), graph.constant(1, "int64")
        self._positions = graph.node("Add", start, graph.node("Range", zero, count, step))  # [B, L]

    # -- operations, by their names --

    def _embed(self, op: ops.Embed) -> str:
        rows = self._products.rows(self._ids, op.table)
        return self._times(rows, op.scale)

    def _norm(self, op: ops.Norm) -> str:
        x = self._values[op.x]
        return self._rms(x, self._vector(op.weight), op.eps, op.groups if op.groups > 1 else None)

    def _linear(self, op: ops.Linear) -> str:
        return self._products.product(self._values[op.x], op.weight, op.bias and self._vector(op.bias))

    def _rope_append(self, op: ops.RopeAppend) -> str:
        """Norms and, where attention cannot do it, rotation; keys and values wait for their attention."""
        graph, cache = self._graph, self._step.caches[op.cache]
        x, dim = self._values[op.x], cache.head_dim
        if not op.append:
            q = self._prepared(x, op, op.heads, op.q_norm, True)
            self._projected[op.out] = (q, op)
            return q
        widths = [op.heads * dim, cache.kv_heads * dim, cache.kv_heads * dim]
        q, k, v = graph.nodes("Split", 3, x, graph.constant(widths, "int64"), axis=-1)
        q = self._prepared(q, op, op.heads, op.q_norm, True)
        k = self._prepared(k, op, cache.kv_heads, op.k_norm, False)
        if op.v_norm is not None:
            v = self._rms(v, None, op.v_norm, cache.kv_heads)
        self._projected[op.out] = (q, op)
        self._new[op.cache] = (k, v)
        return q

    def _attend(self, op: ops.Attend) -> str:
        graph, cache = self._graph, self._step.caches[op.cache]
        q, made = self._projected[op.x]
        inputs = [q, *self._new[op.cache], *self._past[op.cache], self._lengths, self._total]
        flags: dict[str, float] = {"scale": op.scale}
        if self._inside(made):
            inputs += [self._table(str(made.rope), part) for part in ("cos", "sin")]
            flags |= {"do_rotary": 1}
        if op.sinks is not None:
            inputs += [""] * (11 - len(inputs)) + [self._vector(op.sinks)]
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
        self._appended.setdefault(op.cache, (k, v))
        return out

    def _glu(self, op: ops.Glu) -> str:
        gate, up = self._graph.nodes("Split", 2, self._values[op.x], axis=-1, num_outputs=2)
        return self._graph.node("Mul", self._activation(gate, op.activation), up)

    def _act(self, op: ops.Act) -> str:
        return self._activation(self._values[op.x], op.activation)

    def _add(self, op: ops.Add) -> str:
        return self._times(self._graph.node("Add", self._values[op.a], self._values[op.b]), op.scale)

    def _mul(self, op: ops.Mul) -> str:
        return self._graph.node("Mul", self._values[op.a], self._values[op.b])

    def _scale(self, op: ops.Scale) -> str:
        return self._graph.node("Mul", self._values[op.x], self._vector(op.weight))

    def _columns(self, op: ops.Columns) -> str:
        return self._slice(self._values[op.x], op.start, op.start + op.count)

    def _logits(self, op: ops.Logits) -> str:
        graph = self._graph
        start = graph.node("Reshape", graph.node("Neg", self._kept), graph.constant([1], "int64"))
        ends, axis = graph.constant([LAST], "int64"), graph.constant([1], "int64")
        rows = graph.node("Slice", self._values[op.x], start, ends, axis)
        out = self._products.product(rows, op.weight, op.bias and self._vector(op.bias))
        if op.softcap is None:
            return out
        cap = graph.constant(op.softcap, "float32")
        return graph.node("Mul", graph.node("Tanh", graph.node("Div", out, cap)), cap)

    # -- what they are made of --

    def _prepared(self, x: str, op: ops.RopeAppend, heads: int, norm: str | None, query: bool) -> str:
        """Queries or keys [B, L, heads·head_dim]: normalized, rotated, scaled, in the record's order."""
        groups = None if op.norm_all else heads

        def normed(value: str) -> str:
            return value if norm is None else self._rms(value, self._vector(norm), op.eps, groups)

        x = x if op.norm_after else normed(x)
        if op.rope is not None and not self._inside(op):
            x = self._rotated(x, op.rope, heads, self._step.caches[op.cache].head_dim)
        x = normed(x) if op.norm_after else x
        return self._grown(x, *op.q_scale) if query and op.q_scale is not None else x

    def _inside(self, op: ops.RopeAppend) -> bool:
        """Whether the attention rotates: what is normalized afterwards, or read by several layers, is
        rotated before; a factor of the queries may be either side.
        """
        fits = self._step.caches[op.cache].head_dim % ROTARY_HEADS == 0
        return op.rope is not None and fits and not op.norm_after and op.cache not in self._shared

    def _rotated(self, x: str, rope: str, heads: int, dim: int) -> str:
        """Pairs (i, i + dim/2) of each head turned."""
        graph = self._graph
        if rope not in self._turned:  # [B, L, 1, dim/2]
            found = [
                graph.node("Gather", self._table(rope, part), self._positions) for part in ("cos", "sin")
            ]
            axis = graph.constant([2], "int64")
            cos, sin = (graph.node("Unsqueeze", part, axis) for part in found)
            self._turned[rope] = (cos, sin)
        cos, sin = self._turned[rope]
        apart = graph.node("Reshape", x, graph.constant([0, 0, heads, dim], "int64"))
        one, two = graph.nodes("Split", 2, apart, axis=-1, num_outputs=2)
        low = graph.node("Sub", graph.node("Mul", one, cos), graph.node("Mul", two, sin))
        high = graph.node("Add", graph.node("Mul", two, cos), graph.node("Mul", one, sin))
        both = graph.node("Concat", low, high, axis=-1)
        return graph.node("Reshape", both, graph.constant([0, 0, heads * dim], "int64"))

    def _grown(self, q: str, beta: float, original: float) -> str:
        """q·(1 + beta·ln(1 + ⌊position/original⌋))."""
        graph, one = self._graph, self._graph.constant(1, "float32")
        positions = graph.node("Cast", self._positions, to=1)
        whole = graph.node("Floor", graph.node("Div", positions, graph.constant(original, "float32")))
        logs = graph.node(
            "Mul", graph.node("Log", graph.node("Add", whole, one)), graph.constant(beta, "float32")
        )
        factor = graph.node("Unsqueeze", graph.node("Add", logs, one), graph.constant([-1], "int64"))
        return graph.node("Mul", q, factor)

    def _rms(self, x: str, weight: str | None, eps: float, groups: int | None) -> str:
        """Each of `groups` stretches of a row normalized by itself (None: the row), times the weight.

        In these operations because ONNX Runtime fuses them into one and onnx knows them all.
        """
        graph = self._graph
        if groups is not None:
            x = graph.node("Reshape", x, graph.constant([0, 0, groups, -1], "int64"))
        squares = graph.node("Pow", x, graph.constant(2, "float32"))
        mean = graph.node("ReduceMean", squares, graph.constant([-1], "int64"), keepdims=1)
        root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(eps, "float32")))
        out = graph.node("Div", x, root)
        if weight is not None:
            out = graph.node("Mul", out, weight)
        return out if groups is None else graph.node("Reshape", out, graph.constant([0, 0, -1], "int64"))

    def _activation(self, x: str, activation: ops.Activation) -> str:
        graph = self._graph
        match activation:
            case "silu":
                return graph.node("Mul", x, graph.node("Sigmoid", x))
            case "gelu_tanh":
                return graph.node("Gelu", x, approximate="tanh")
            case "gelu_erf":
                return graph.node("Gelu", x)
            case "relu2":
                kept = graph.node("Relu", x)
                return graph.node("Mul", kept, kept)

    def _slice(self, x: str, start: int, end: int) -> str:
        graph = self._graph
        return graph.node("Slice", x, *(graph.constant([value], "int64") for value in (start, end, -1)))

    def _times(self, x: str, factor: float) -> str:
        return x if factor == 1.0 else self._graph.node("Mul", x, self._graph.constant(factor, "float32"))

    def _vector(self, name: str) -> str:
        return self._graph.external(name, self._single[name])

    def _table(self, rope: str, part: str) -> str:
        return self._graph.external(f"rope.{rope}.{part}", self._single[f"rope.{rope}.{part}"])


def _shared_caches(model: Model) -> set[int]:
    """Caches that layers read which do not append to them: their keys are used rotated, by each."""
    return {op.cache for op in model.step.ops if isinstance(op, ops.RopeAppend) and not op.append}


def unknown_operations(listed: tuple[Op, ...]) -> list[str]:
    """The operations of a list that no method here writes."""
    return sorted({op.op for op in listed if not hasattr(Lowering, f"_{op.op}")})
