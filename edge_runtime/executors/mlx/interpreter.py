"""Walks the list of a model's step (nearfar.step.ops) over MLX arrays: no model is known here.

Two things are behind interfaces, so that one walk serves the paged cache of the runtime (paged.py) and the
function that is exported to a file (nearfar.targets.mlx.export): where weights come from, and what a step
does with rows and cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from nearfar.edge_runtime.executors.mlx.elementwise import Elementwise, wide
from nearfar.step.ops import (
    Act,
    Add,
    Attend,
    Columns,
    Embed,
    Glu,
    Linear,
    Logits,
    Mul,
    Norm,
    Op,
    RopeAppend,
    Scale,
    reads,
)

Value = tuple[mx.array, ...]
"""A value of the list: arrays [..., L, width] whose columns stand side by side. What several matrices made
stays apart until somebody reads it as one."""


class Matrix(Protocol):
    """A weight matrix [N, K]."""

    def __call__(self, x: mx.array) -> Value:
        """Products with x [..., K], N columns in all."""
        ...

    def rows(self, index: mx.array) -> mx.array:
        """Rows, as floats: index's shape and K."""
        ...


class Weights(Protocol):
    """The parameters of the step, by their names."""

    def matrix(self, name: str) -> Matrix:
        """A matrix."""
        ...

    def vector(self, name: str, dtype: mx.Dtype) -> Value:
        """A vector, in pieces that stand side by side."""
        ...


class CacheShape(Protocol):
    """Geometry of a cache."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        ...


class Run(Protocol):
    """One step's rows: where they stand, and the cache that they write and read."""

    @property
    def tokens(self) -> mx.array:
        """Token ids [..., L]."""
        ...

    def positions(self) -> mx.array:
        """Positions of the rows, float32 [..., L, 1]; 0 for padding."""
        ...

    def columns(self, x: mx.array, index: Sequence[int] | range) -> mx.array:
        """Columns of x, in this order."""
        ...

    def rotate(self, rope: str, x: Value, head_dim: int) -> Value:
        """Heads turned by their rows' positions, by the table of that name."""
        ...

    def append(self, cache: int, keys: mx.array, values: mx.array) -> None:
        """Store keys and values [..., L, kv_heads·head_dim] of all rows."""
        ...

    def attend(self, op: Attend, queries: mx.array, sinks: mx.array | None) -> mx.array:
        """Attention of queries [..., L, heads·head_dim]; sinks [heads]."""
        ...

    def choose(self, values: Sequence[Value]) -> list[Value]:
        """The values of the rows whose logits are wanted. From here on the step has these rows only."""
        ...


class Interpreter:
    """The list, ready to be walked."""

    def __init__(
        self, ops: Sequence[Op], caches: Sequence[CacheShape], weights: Weights, arithmetic: Elementwise
    ) -> None:
        """`ops` end with Logits."""
        *self._ops, end = ops
        if not isinstance(end, Logits) or any(isinstance(op, Logits) for op in self._ops):
            raise ValueError("the list of a step must end with logits, and have them once")
        self._end: Logits = end
        self._caches, self._weights, self._do = caches, weights, arithmetic
        appends = [at for at, op in enumerate(self._ops) if isinstance(op, RopeAppend) and op.append]
        self._last_append = max(appends, default=-1)
        made = {op.out for op in self._ops[: self._last_append + 1]}
        later = [name for op in ops[self._last_append + 1 :] for name in reads(op) if name in made]
        self._live = list(dict.fromkeys(later))

    def step(self, run: Run) -> mx.array:
        """What the logits are made of, for the wanted rows [..., R, width]. Cache appended to."""
        values: dict[str, Value] = {}
        for at, op in enumerate(self._ops):
            values[op.out] = self._value(op, values, run)
            if at == self._last_append:  # past the last cache, only the rows matter that somebody asks for
                values = dict(zip(self._live, run.choose([values[name] for name in self._live]), strict=True))
        return whole(values[self._end.x])

    def logits(self, hidden: mx.array) -> mx.array:
        """float32 [..., R, vocab] of what `step` gave."""
        end = self._end
        out = whole(self._product(end.weight, end.bias, hidden)).astype(mx.float32)
        return out if end.softcap is None else mx.tanh(out / end.softcap) * end.softcap

    def _value(self, op: Op, values: dict[str, Value], run: Run) -> Value:
        do = self._do
        match op:
            case Embed():
                rows = self._weights.matrix(op.table).rows(run.tokens).astype(mx.float32)
                return (rows if op.scale == 1 else rows * op.scale,)
            case Norm():
                return (self._norm(op, whole(values[op.x])),)
            case Linear():
                return self._product(op.weight, op.bias, whole(values[op.x]))
            case RopeAppend():
                return (self._rope_append(op, values[op.x], run),)
            case Attend():
                sinks = None if op.sinks is None else whole(self._weights.vector(op.sinks, do.dtype))
                return (run.attend(op, whole(values[op.x]), sinks),)
            case Glu():
                x = values[op.x]
                half = sum(part.shape[-1] for part in x) // 2
                gate, up = (whole(cut(run, x, start, half)) for start in (0, half))
                return (do.glu(op.activation, gate, up),)
            case Act():
                return (do.act(op.activation, whole(values[op.x])),)
            case Add():
                return (do.add(whole(values[op.a]), whole(values[op.b]), op.scale),)
            case Mul():
                return (do.mul(whole(values[op.a]), whole(values[op.b])),)
            case Scale():
                return (do.mul(whole(values[op.x]), whole(self._weights.vector(op.weight, mx.float32))),)
            case Columns():
                return cut(run, values[op.x], op.start, op.count)
            case Logits():
                raise AssertionError("the end of the list stands apart")

    def _product(self, weight: str, bias: str | None, x: mx.array) -> Value:
        out = self._weights.matrix(weight)(self._do.narrow(x))
        if bias is None:
            return out
        added = self._weights.vector(bias, self._do.dtype)
        if len(added) == len(out):
            return tuple(part + more for part, more in zip(out, added, strict=True))
        return (whole(out) + whole(added),)

    def _norm(self, op: Norm, x: mx.array) -> mx.array:
        x, weight = wide(x), whole(self._weights.vector(op.weight, mx.float32))
        return (
            mx.fast.rms_norm(x, weight, op.eps)
            if op.groups == 1
            else _by_heads(x, -1, op.groups, weight, op.eps)
        )

    def _rope_append(self, op: RopeAppend, x: Value, run: Run) -> mx.array:
        """Queries [..., L, heads·head_dim]; keys and values go to the cache."""
        shape = self._caches[op.cache]
        q_width, kv_width = op.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        x = tuple(self._do.narrow(part) for part in x)
        turned = cut(run, x, 0, q_width + (kv_width if op.append else 0))
        if not op.norm_after:
            turned = self._head_norms(op, turned, run)
        if op.rope is not None:
            turned = run.rotate(op.rope, turned, shape.head_dim)
        if op.norm_after:
            turned = self._head_norms(op, turned, run)
        queries = whole(cut(run, turned, 0, q_width))
        if op.q_scale is not None:
            beta, original = op.q_scale
            grown = 1 + beta * mx.log1p(mx.floor(run.positions() / original))
            queries = queries * grown.astype(queries.dtype)
        if op.append:
            values = whole(cut(run, x, q_width + kv_width, kv_width))
            if op.v_norm is not None:
                values = _by_heads(values, shape.head_dim, -1, None, op.v_norm)
            run.append(op.cache, whole(cut(run, turned, q_width, kv_width)), values)
        return queries

    def _head_norms(self, op: RopeAppend, x: Value, run: Run) -> Value:
        """Queries, and keys where there are some, normalized as the operation says."""
        if op.q_norm is None and op.k_norm is None:
            return x
        head_dim, width = self._caches[op.cache].head_dim, sum(part.shape[-1] for part in x)
        ends = [0, op.heads * head_dim, width]
        out: list[mx.array] = []
        for start, end, name in ((ends[0], ends[1], op.q_norm), (ends[1], ends[2], op.k_norm)):
            part = cut(run, x, start, end - start)
            if name is None or start == end:
                out += part
                continue
            weight = whole(self._weights.vector(name, self._do.dtype))
            if op.norm_all:
                out.append(mx.fast.rms_norm(whole(part), weight, op.eps))
            else:
                out.append(_by_heads(whole(part), head_dim, -1, weight, op.eps))
        return tuple(out)


def whole(value: Value) -> mx.array:
    """As one array."""
    return value[0] if len(value) == 1 else mx.concatenate(list(value), axis=-1)


def cut(run: Run, value: Value, start: int, count: int) -> Value:
    """Columns [start, start + count); parts that lie within stay as they are."""
    parts, at = [], 0
    for part in value:
        width = part.shape[-1]
        first, last = max(start, at), min(start + count, at + width)
        if first < last:
            parts.append(part if last - first == width else run.columns(part, range(first - at, last - at)))
        at += width
    return tuple(parts)


def _by_heads(x: mx.array, head_dim: int, heads: int, weight: mx.array | None, eps: float) -> mx.array:
    """RMS norm of each of `heads` equal stretches of x [..., heads·head_dim]; one of the two may be −1."""
    return mx.flatten(mx.fast.rms_norm(mx.unflatten(x, -1, (heads, head_dim)), weight, eps), -2, -1)
