"""Reads the list of a model's step (nearfar.step.ops) as calls of MLX: no model is known here.

Two things are behind interfaces, so that one reading serves the paged cache of the runtime (paged.py) and the
function that is exported to a file (nearfar.build.targets.mlx_function): where weights come from, and what
a step does with rows and cache (calls.Run).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import mlx.core as mx

from nearfar.edge_runtime.executors.mlx.calls import HEADS, Arrays, Calls, Made, Part, Run, Value, whole
from nearfar.edge_runtime.executors.mlx.elementwise import Binary, Elementwise
from nearfar.step.ops import (
    Act,
    Add,
    Attend,
    Columns,
    Embed,
    Embedding,
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

Product = Callable[[mx.array], Arrays]
"""The product of x [..., K] with a matrix."""


class Matrix(Protocol):
    """A weight matrix [N, K]."""

    @property
    def k(self) -> int: ...

    @property
    def widths(self) -> Sequence[int]:
        """Columns of what a call gives, array by array: N in all."""
        ...

    def __call__(self, x: mx.array) -> Arrays:
        """Products with x [..., K]."""
        ...

    def rows(self, index: mx.array) -> mx.array:
        """Rows, as floats: index's shape and K."""
        ...


class Weights(Protocol):
    """The parameters of the step, by their names."""

    def matrix(self, name: str) -> Matrix: ...

    def vector(self, name: str, dtype: mx.Dtype) -> Arrays:
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


class Interpreter:
    """The list, ready to be walked: weights are found, and what an operation asks for decided, once."""

    def __init__(
        self, ops: Sequence[Op], caches: Sequence[CacheShape], weights: Weights, arithmetic: Elementwise
    ) -> None:
        """`ops` end with Logits or Embedding."""
        *body, end = ops
        if not isinstance(end, Logits | Embedding) or any(isinstance(op, Logits | Embedding) for op in body):
            raise ValueError("the list of a step must end with logits or an embedding, and have them once")
        turned = {op.out for op in body if isinstance(op, RopeAppend)}
        if any(turned & set(reads(op)) for op in ops if not isinstance(op, Attend)):
            raise ValueError("what rope_append makes can be read by attend only")
        self._caches, self._weights, self._do = caches, weights, arithmetic
        self._calls = Calls()
        self._values: dict[str, Value] = {}
        appends = [at for at, op in enumerate(body, 1) if isinstance(op, RopeAppend) and op.append]
        past = max(appends, default=0)
        self._add_all(body[:past])
        read = dict.fromkeys(name for op in ops[past:] for name in reads(op) if name in self._values)
        self._live = [part.at for name in read for part in self._values[name]]
        first = len(self._calls.all)
        self._add_all(body[past:])
        last = self._whole(end.x)
        self._end = last if isinstance(end, Embedding) else self._narrow(last)
        self._walk, self._rest = self._calls.all[:first], self._calls.all[first:]
        self._softcap = None if isinstance(end, Embedding) else end.softcap
        self._head: Product | None = None
        if isinstance(end, Logits):
            self._head, _ = self._product(end.weight, end.bias)

    def step(self, run: Run) -> mx.array:
        """What the logits are made of, for the wanted rows [..., R, width]. Cache appended to."""
        made: Made = []
        for call in self._walk:
            made += call(made, run)
        if self._live:  # past the last cache, only the rows matter that somebody asks for
            for at, chosen in zip(self._live, run.choose([made[at] for at in self._live]), strict=True):
                made[at] = chosen
        for call in self._rest:
            made += call(made, run)
        return made[self._end.at]

    def logits(self, hidden: mx.array) -> mx.array:
        """float32 [..., R, vocab] of what `step` gave; of an Embedding that itself."""
        if self._head is None:
            return hidden.astype(mx.float32)
        out, softcap = whole(self._head(hidden)).astype(mx.float32), self._softcap
        return out if softcap is None else mx.tanh(out / softcap) * softcap

    def _add_all(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self._values[op.out] = self._add(op)

    def _add(self, op: Op) -> Value:
        """The calls of an operation, and what it makes."""
        do, calls = self._do, self._calls
        match op:
            case Embed():
                return self._embed(op)
            case Norm():
                return self._norm(op)
            case Linear():
                product, widths = self._product(op.weight, op.bias)
                at = self._narrow(self._whole(op.x)).at
                return calls.add(lambda made, run: product(made[at]), *widths)
            case RopeAppend():
                return self._rope_append(op)
            case Attend():
                sinks = None if op.sinks is None else whole(self._weights.vector(op.sinks, do.dtype))
                at, width = self._whole(op.x).at, op.heads * self._caches[op.cache].head_dim
                return calls.add(lambda made, run: (run.attend(op, made[at], sinks),), width)
            case Glu():
                x = self._values[op.x]
                half = sum(part.width for part in x) // 2
                gate, up = (calls.whole(calls.cut(x, start, half)) for start in (0, half))
                return self._both(do.glu(op.activation), gate, up)
            case Act():
                act = do.act(op.activation)
                return calls.each((self._whole(op.x),), lambda x, run: act(x))
            case Add():
                return self._both(do.add(op.scale), self._whole(op.a), self._whole(op.b))
            case Mul():
                return self._both(do.mul(), self._whole(op.a), self._whole(op.b))
            case Scale():
                times, factor = do.mul(), whole(self._weights.vector(op.weight, mx.float32))
                return calls.each((self._whole(op.x),), lambda x, run: times(x, factor))
            case Columns():
                return calls.cut(self._values[op.x], op.start, op.count)
            case Logits() | Embedding():
                raise AssertionError("the end of the list stands apart")

    def _whole(self, name: str) -> Part:
        """A value as one array, for all who read it from here on."""
        part = self._calls.whole(self._values[name])
        self._values[name] = (part,)
        return part

    def _narrow(self, part: Part) -> Part:
        """As products read it."""
        narrow = self._do.narrow
        return part if narrow is None else self._calls.each((part,), lambda x, run: narrow(x))[0]

    def _wide(self, part: Part) -> Part:
        """As norms read it."""
        wide = self._do.wide
        return part if wide is None else self._calls.each((part,), lambda x, run: wide(x))[0]

    def _both(self, function: Binary, a: Part, b: Part) -> Value:
        first, second = a.at, b.at
        return self._calls.add(lambda made, run: (function(made[first], made[second]),), a.width)

    def _embed(self, op: Embed) -> Value:
        table, scale = self._weights.matrix(op.table), op.scale

        def embed(made: Made, run: Run) -> Arrays:
            rows = table.rows(run.tokens).astype(mx.float32)
            return (rows if scale == 1 else rows * scale,)

        return self._calls.add(embed, table.k)

    def _norm(self, op: Norm) -> Value:
        weight, eps, groups = whole(self._weights.vector(op.weight, mx.float32)), op.eps, op.groups
        x = (self._wide(self._whole(op.x)),)
        if groups == 1:
            return self._calls.each(x, lambda x, run: mx.fast.rms_norm(x, weight, eps))
        return self._calls.each(x, lambda x, run: _by_groups(x, groups, weight, eps))

    def _product(self, weight: str, bias: str | None) -> tuple[Product, Sequence[int]]:
        """Products with a matrix, and the widths of the arrays that they give."""
        matrix = self._weights.matrix(weight)
        if bias is None:
            return matrix, matrix.widths
        parts = self._weights.vector(bias, self._do.dtype)
        if len(parts) != len(matrix.widths):
            parts = [*mx.split(whole(parts), list(accumulate(matrix.widths))[:-1])]
        added = parts
        return lambda x: [y + more for y, more in zip(matrix(x), added, strict=True)], matrix.widths

    def _rope_append(self, op: RopeAppend) -> Value:
        """Queries [..., L, heads, head_dim]; keys and values go to the cache."""
        calls, shape = self._calls, self._caches[op.cache]
        keys, head_dim = (shape.kv_heads if op.append else 0), shape.head_dim
        x = tuple(map(self._narrow, self._values[op.x]))
        x = calls.each(x, lambda x, run: mx.unflatten(x, -1, (-1, head_dim)), head_dim)
        turned = calls.cut(x, 0, op.heads + keys)
        if not op.norm_after:
            turned = self._head_norms(op, keys, turned)
        if (rope := op.rope) is not None:
            turned = calls.each(turned, lambda x, run: run.rotate(rope, x))
        if op.norm_after:
            turned = self._head_norms(op, keys, turned)
        if op.append:
            self._append(op, calls.cut(turned, op.heads, keys), calls.cut(x, op.heads + keys, keys))
        queries = (calls.whole(calls.cut(turned, 0, op.heads), HEADS),)
        return queries if op.q_scale is None else calls.each(queries, _grown(*op.q_scale))

    def _append(self, op: RopeAppend, keys: Value, values: Value) -> None:
        if (eps := op.v_norm) is not None:
            values = self._calls.each(values, lambda x, run: mx.fast.rms_norm(x, None, eps))
        k, v = (self._calls.whole(value, HEADS).at for value in (keys, values))

        def append(made: Made, run: Run) -> Arrays:
            run.append(op.cache, made[k], made[v])
            return ()

        self._calls.add(append)

    def _head_norms(self, op: RopeAppend, keys: int, x: Value) -> Value:
        """Queries, and so many heads of keys, normalized as the operation says."""
        if op.q_norm is None and op.k_norm is None:
            return x
        out: list[Part] = []
        for start, count, name in ((0, op.heads, op.q_norm), (op.heads, keys, op.k_norm)):
            part = self._calls.cut(x, start, count)
            if count and name is not None:
                weight = whole(self._weights.vector(name, self._do.dtype))
                part = self._calls.each((self._calls.whole(part, HEADS),), _head_norm(op, weight))
            out += part
        return tuple(out)


def _head_norm(op: RopeAppend, weight: mx.array) -> Callable[[mx.array, Run], mx.array]:
    """RMS norm of each head, or of all as one row."""
    eps = op.eps
    if not op.norm_all:
        return lambda x, run: mx.fast.rms_norm(x, weight, eps)
    return lambda x, run: mx.unflatten(
        mx.fast.rms_norm(mx.flatten(x, -2, -1), weight, eps), -1, (x.shape[-2], -1)
    )


def _grown(beta: float, original: float) -> Callable[[mx.array, Run], mx.array]:
    """Queries times 1 + beta·ln(1 + ⌊position/original⌋)."""

    def grown(x: mx.array, run: Run) -> mx.array:
        factor = 1 + beta * mx.log1p(mx.floor(run.positions() / original))
        return x * mx.expand_dims(factor, -1).astype(x.dtype)

    return grown


def _by_groups(x: mx.array, groups: int, weight: mx.array, eps: float) -> mx.array:
    """RMS norm of each of so many equal stretches of x [..., width]."""
    return mx.flatten(mx.fast.rms_norm(mx.unflatten(x, -1, (groups, -1)), weight, eps), -2, -1)
