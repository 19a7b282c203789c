"""Walks the list of a model's step (nearfar.step.ops) over MLX arrays: no model is known here.

Two things are behind interfaces, so that one walk serves the paged cache of the runtime (paged.py) and the
function that is exported to a file (nearfar.targets.mlx.export): where weights come from, and what a step
does with rows and cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
stays apart until somebody reads it as one. What rope_append makes, for attend, has heads:
[..., L, heads, head_dim]."""


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
        """Columns of x [..., L, width], or heads of x [..., L, heads, head_dim], in this order."""
        ...

    def rotate(self, rope: str, x: Value) -> Value:
        """Heads [..., L, heads, head_dim] turned by their rows' positions, by the table of that name."""
        ...

    def append(self, cache: int, keys: mx.array, values: mx.array) -> None:
        """Store keys and values [..., L, kv_heads, head_dim] of all rows."""
        ...

    def attend(self, op: Attend, queries: mx.array, sinks: mx.array | None) -> mx.array:
        """Attention of queries [..., L, heads, head_dim], as [..., L, heads·head_dim]; sinks [heads]."""
        ...

    def choose(self, values: Sequence[Value]) -> list[Value]:
        """The values of the rows whose logits are wanted. From here on the step has these rows only."""
        ...


Values = dict[str, Value]
"""By their names in the list."""
Function = Callable[[Values, Run], Value]
"""What an operation of the list makes of the values so far."""


class Interpreter:
    """The list, ready to be walked: weights are found, and what an operation asks for decided, once.

    A step of a small model is spent on the host more than on the device, so a walk only calls functions.
    """

    def __init__(
        self, ops: Sequence[Op], caches: Sequence[CacheShape], weights: Weights, arithmetic: Elementwise
    ) -> None:
        """`ops` end with Logits."""
        *body, end = ops
        if not isinstance(end, Logits) or any(isinstance(op, Logits) for op in body):
            raise ValueError("the list of a step must end with logits, and have them once")
        turned = {op.out for op in body if isinstance(op, RopeAppend)}
        if any(turned & set(reads(op)) for op in ops if not isinstance(op, Attend)):
            raise ValueError("what rope_append makes can be read by attend only")
        self._caches, self._weights, self._do = caches, weights, arithmetic
        appends = [at for at, op in enumerate(body, 1) if isinstance(op, RopeAppend) and op.append]
        past = max(appends, default=0)
        made = {op.out for op in body[:past]}
        self._live = list(dict.fromkeys(name for op in ops[past:] for name in reads(op) if name in made))
        walk = [(op.out, self._function(op)) for op in body]
        self._walk, self._rest = walk[:past], walk[past:]
        self._end, self._softcap = end.x, end.softcap
        self._head = self._product(end.weight, end.bias)

    def step(self, run: Run) -> mx.array:
        """What the logits are made of, for the wanted rows [..., R, width]. Cache appended to."""
        values: Values = {}
        for out, function in self._walk:
            values[out] = function(values, run)
        if self._walk:  # past the last cache, only the rows matter that somebody asks for
            values = dict(zip(self._live, run.choose([values[name] for name in self._live]), strict=True))
        for out, function in self._rest:
            values[out] = function(values, run)
        return whole(values[self._end])

    def logits(self, hidden: mx.array) -> mx.array:
        """float32 [..., R, vocab] of what `step` gave."""
        out, softcap = whole(self._head(hidden)).astype(mx.float32), self._softcap
        return out if softcap is None else mx.tanh(out / softcap) * softcap

    def _function(self, op: Op) -> Function:
        """What an operation does to the values."""
        do = self._do
        match op:
            case Embed():
                return self._embed(op)
            case Norm():
                return self._norm(op)
            case Linear():
                product = self._product(op.weight, op.bias)
                return lambda values, run: product(whole(values[op.x]))
            case RopeAppend():
                return self._rope_append(op)
            case Attend():
                sinks = None if op.sinks is None else whole(self._weights.vector(op.sinks, do.dtype))
                return lambda values, run: (run.attend(op, whole(values[op.x]), sinks),)
            case Glu():
                return self._glu(op)
            case Act():
                act = do.act(op.activation)
                return lambda values, run: (act(whole(values[op.x])),)
            case Add():
                add = do.add(op.scale)
                return lambda values, run: (add(whole(values[op.a]), whole(values[op.b])),)
            case Mul():
                mul = do.mul()
                return lambda values, run: (mul(whole(values[op.a]), whole(values[op.b])),)
            case Scale():
                times, factor = do.mul(), whole(self._weights.vector(op.weight, mx.float32))
                return lambda values, run: (times(whole(values[op.x]), factor),)
            case Columns():
                return lambda values, run: cut(run, values[op.x], op.start, op.count)
            case Logits():
                raise AssertionError("the end of the list stands apart")

    def _embed(self, op: Embed) -> Function:
        table, scale = self._weights.matrix(op.table), op.scale

        def embed(values: Values, run: Run) -> Value:
            rows = table.rows(run.tokens).astype(mx.float32)
            return (rows if scale == 1 else rows * scale,)

        return embed

    def _norm(self, op: Norm) -> Function:
        weight, eps, groups, x = whole(self._weights.vector(op.weight, mx.float32)), op.eps, op.groups, op.x
        if groups == 1:
            return lambda values, run: (mx.fast.rms_norm(wide(whole(values[x])), weight, eps),)
        return lambda values, run: (_by_groups(wide(whole(values[x])), groups, weight, eps),)

    def _product(self, weight: str, bias: str | None) -> Callable[[mx.array], Value]:
        matrix, narrow = self._weights.matrix(weight), self._do.narrow
        if bias is None:
            return lambda x: matrix(narrow(x))
        added = self._weights.vector(bias, self._do.dtype)

        def biased(x: mx.array) -> Value:
            out = matrix(narrow(x))
            if len(added) == len(out):
                return tuple(part + more for part, more in zip(out, added, strict=True))
            return (whole(out) + whole(added),)

        return biased

    def _glu(self, op: Glu) -> Function:
        act = self._do.glu(op.activation)

        def glu(values: Values, run: Run) -> Value:
            x = values[op.x]
            half = sum(part.shape[-1] for part in x) // 2
            return (act(whole(cut(run, x, 0, half)), whole(cut(run, x, half, half))),)

        return glu

    def _rope_append(self, op: RopeAppend) -> Function:
        """Queries [..., L, heads, head_dim]; keys and values go to the cache."""
        shape, narrow, rope = self._caches[op.cache], self._do.narrow, op.rope
        keys, head_dim = (shape.kv_heads if op.append else 0), shape.head_dim
        norms = self._head_norms(op, keys)

        def rope_append(values: Values, run: Run) -> Value:
            x = tuple([mx.unflatten(narrow(part), -1, (-1, head_dim)) for part in values[op.x]])
            turned = cut(run, x, 0, op.heads + keys, HEADS)
            if norms is not None and not op.norm_after:
                turned = norms(turned, run)
            if rope is not None:
                turned = run.rotate(rope, turned)
            if norms is not None and op.norm_after:
                turned = norms(turned, run)
            queries = whole(cut(run, turned, 0, op.heads, HEADS), HEADS)
            if op.q_scale is not None:
                beta, original = op.q_scale
                grown = 1 + beta * mx.log1p(mx.floor(run.positions() / original))
                queries = queries * mx.expand_dims(grown, -1).astype(queries.dtype)
            if op.append:
                kept = whole(cut(run, x, op.heads + keys, keys, HEADS), HEADS)
                if op.v_norm is not None:
                    kept = mx.fast.rms_norm(kept, None, op.v_norm)
                run.append(op.cache, whole(cut(run, turned, op.heads, keys, HEADS), HEADS), kept)
            return (queries,)

        return rope_append

    def _head_norms(self, op: RopeAppend, keys: int) -> Callable[[Value, Run], Value] | None:
        """Queries, and so many heads of keys, normalized as the operation says. None: not at all."""
        if op.q_norm is None and op.k_norm is None:
            return None
        parts = [
            (start, count, None if name is None else whole(self._weights.vector(name, self._do.dtype)))
            for start, count, name in ((0, op.heads, op.q_norm), (op.heads, keys, op.k_norm))
            if count
        ]

        def norms(x: Value, run: Run) -> Value:
            out: list[mx.array] = []
            for start, count, weight in parts:
                part = cut(run, x, start, count, HEADS)
                if weight is None:
                    out += part
                elif op.norm_all:
                    row = mx.fast.rms_norm(mx.flatten(whole(part, HEADS), -2, -1), weight, op.eps)
                    out.append(mx.unflatten(row, -1, (count, -1)))
                else:
                    out.append(mx.fast.rms_norm(whole(part, HEADS), weight, op.eps))
            return tuple(out)

        return norms


HEADS = -2
"""The axis of heads, where a value has one."""


def whole(value: Value, axis: int = -1) -> mx.array:
    """As one array."""
    return value[0] if len(value) == 1 else mx.concatenate(list(value), axis=axis)


def cut(run: Run, value: Value, start: int, count: int, axis: int = -1) -> Value:
    """Columns or heads [start, start + count) along the axis; parts that lie within stay as they are."""
    parts, at, end = [], 0, start + count
    for part in value:
        width = part.shape[axis]
        first, last = max(start - at, 0), min(end - at, width)
        if first < last:
            parts.append(part if last - first == width else run.columns(part, range(first, last)))
        at += width
    return tuple(parts)


def _by_groups(x: mx.array, groups: int, weight: mx.array, eps: float) -> mx.array:
    """RMS norm of each of so many equal stretches of x [..., width]."""
    return mx.flatten(mx.fast.rms_norm(mx.unflatten(x, -1, (groups, -1)), weight, eps), -2, -1)
