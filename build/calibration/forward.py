"""A forward over calibration windows, a stretch of the step at a time: all windows go through one stretch
before the next is read, so that memory holds the weights of one stretch and what goes from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nearfar.build.calibration.arithmetic import (
    ACTIVATIONS,
    Array,
    capped,
    linear,
    rms_norm,
    rotate,
)
from nearfar.step import ops
from nearfar.step.model import Step

MOST_LIVE = 3
"""Values that may go from one stretch to the next: a stretch ends where no more are needed later."""
BLOCK_TOKENS = 2048
"""Tokens that go through a stretch together, about."""

Weights = Mapping[str, Array]
Watch = Callable[[str, Array], None]
"""Told the inputs [rows, k] of a matrix, by its name, block by block."""
Heads = Callable[[ops.RopeAppend | ops.Attend, Array], None]
"""Told, block by block, the keys that are appended, [windows, kv_heads, length, head_dim], and the queries of
attention, [windows, kv_heads, heads of each, length, head_dim].
"""


@dataclass(frozen=True)
class Stretch:
    """Consecutive operations of a step; `params`: the weights that they read; `live`: the values of these and
    of earlier ones that later ones read.
    """

    ops: tuple[ops.Op, ...]
    params: tuple[str, ...]
    live: tuple[str, ...]


def stretches(step: Step) -> list[Stretch]:
    """The step cut where few values, and no cache, go on."""
    last: dict[str, int] = {}
    shared: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        for name in ops.reads(op):
            last[name] = index
        if isinstance(op, ops.RopeAppend | ops.Attend):
            shared[op.cache] = index
    out: list[Stretch] = []
    made: list[str] = []
    begun: set[int] = set()
    start = 0
    for index, op in enumerate(step.ops):
        made.append(op.out)
        if isinstance(op, ops.RopeAppend):
            begun.add(op.cache)
        live = tuple(name for name in made if last.get(name, -1) > index)
        ends = index == len(step.ops) - 1
        if ends or (
            isinstance(op, ops.Add)
            and len(live) <= MOST_LIVE
            and all(shared[cache] <= index for cache in begun)
        ):
            part = step.ops[start : index + 1]
            names = dict.fromkeys(name for op in part for name in ops.weights_of(op))
            out.append(Stretch(part, tuple(names), live))
            start, made = index + 1, list(live)
    return out


class Forward:
    """Windows of tokens int [windows, length] on their way through a step, each a sequence of its own."""

    def __init__(self, step: Step, windows: Array) -> None:
        self.step, self.windows = step, windows
        self.live: dict[str, Array] = {}
        """What the last stretch left: float32 [windows · length, width]."""

    def copy(self) -> Forward:
        """Another one at the same place."""
        other = Forward(self.step, self.windows)
        other.live = dict(self.live)
        return other

    @staticmethod
    def together(some: Iterable[Forward]) -> Forward:
        """The windows of several at the same place, one after the other."""
        parts = list(some)
        other = Forward(parts[0].step, np.concatenate([part.windows for part in parts]))
        other.live = {name: np.concatenate([part.live[name] for part in parts]) for name in parts[0].live}
        return other

    def thinned(self, every: int) -> Forward:
        """At each `every`-th token of a window alone, for a stretch that does not look at others."""
        count, length = self.windows.shape
        other = Forward(self.step, self.windows[:, every - 1 :: every])
        other.live = {
            name: value.reshape(count, length, -1)[:, every - 1 :: every].reshape(other.windows.size, -1)
            for name, value in self.live.items()
        }
        return other

    def watch(self, stretch: Stretch, weights: Weights, watch: Watch) -> None:
        """Run a stretch for what its matrices are given; nothing goes on."""
        for _, _ in self._blocks(stretch, weights, watch):
            pass

    def advance(
        self, stretch: Stretch, weights: Weights, watch: Watch | None = None, heads: Heads | None = None
    ) -> None:
        """Run a stretch; what it leaves is there for the next."""
        found: dict[str, list[Array]] = {name: [] for name in stretch.live}
        for _, values in self._blocks(stretch, weights, watch, heads):
            for name, parts in found.items():
                parts.append(values[name])
        self.live = {name: np.concatenate(parts) for name, parts in found.items()}

    def finish(self, stretch: Stretch, weights: Weights) -> Iterator[Array]:
        """Run the last stretch: logits [rows, vocab], block by block."""
        for _, values in self._blocks(stretch, weights, None):
            yield values[stretch.ops[-1].out]

    def _blocks(
        self, stretch: Stretch, weights: Weights, watch: Watch | None, heads: Heads | None = None
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        count, length = self.windows.shape
        size = max(1, BLOCK_TOKENS // length)
        for start in range(0, count, size):
            tokens = self.windows[start : start + size]
            rows = slice(start * length, start * length + tokens.size)
            values = {name: value[rows] for name, value in self.live.items()}
            _Block(self.step, tokens, weights, values, watch, heads).run(stretch.ops)
            yield start, values


class _Block:
    """Some windows in one stretch."""

    def __init__(
        self,
        step: Step,
        tokens: Array,
        weights: Weights,
        values: dict[str, Array],
        watch: Watch | None,
        heads: Heads | None,
    ) -> None:
        self.step, self.tokens, self.w, self.values = step, tokens, weights, values
        self.watch, self.heads = watch, heads
        self.count, self.length = tokens.shape
        self.positions = np.tile(np.arange(self.length), self.count)
        self.kept: dict[int, tuple[Array, Array]] = {}
        """Keys and values of a cache: [windows, kv_heads, length, head_dim]."""

    def run(self, part: Sequence[ops.Op]) -> None:
        for op in part:
            if self.watch is not None and isinstance(op, ops.Linear | ops.Logits):
                self.watch(op.weight, self.values[op.x])
                if isinstance(op, ops.Logits):
                    return  # the head's inputs are all that was wanted
            self.values[op.out] = self._apply(op)

    def _apply(self, op: ops.Op) -> Array:
        w, values = self.w, self.values
        match op:
            case ops.Embed():
                return w[op.table][self.tokens.reshape(-1)] * np.float32(op.scale)
            case ops.Norm():
                x = values[op.x]
                return rms_norm(x.reshape(len(x), op.groups, -1), w[op.weight], op.eps).reshape(x.shape)
            case ops.Linear():
                return linear(values[op.x], w[op.weight], w[op.bias] if op.bias else None)
            case ops.RopeAppend():
                return self._rope_append(op, values[op.x])
            case ops.Attend():
                return self._attend(op, values[op.x])
            case ops.Glu():
                gate, up = np.split(values[op.x], 2, -1)
                return np.asarray(ACTIVATIONS[op.activation](gate) * up)
            case ops.Act():
                return ACTIVATIONS[op.activation](values[op.x])
            case ops.Add():
                return (values[op.a] + values[op.b]) * np.float32(op.scale)
            case ops.Mul():
                return values[op.a] * values[op.b]
            case ops.Scale():
                return values[op.x] * w[op.weight]
            case ops.Columns():
                return values[op.x][:, op.start : op.start + op.count]
            case ops.Embedding():
                return values[op.x]
            case ops.Logits():
                return capped(linear(values[op.x], w[op.weight], w[op.bias] if op.bias else None), op.softcap)

    def _rope_append(self, op: ops.RopeAppend, x: Array) -> Array:
        cache = self.step.caches[op.cache]
        widths = op.heads * cache.head_dim, cache.kv_heads * cache.head_dim
        q = self._turned(op, x[:, : widths[0]], op.q_norm)
        if op.q_scale is not None:
            beta, original = op.q_scale
            q = q * (1 + beta * np.log1p(self.positions // original)).astype(q.dtype)[:, None, None]
        if op.append:
            k = self._turned(op, x[:, widths[0] : sum(widths)], op.k_norm)
            v = x[:, sum(widths) :].reshape(len(x), -1, cache.head_dim)
            if op.v_norm is not None:
                v = rms_norm(v, np.ones(cache.head_dim, np.float32), op.v_norm)
            self.kept[op.cache] = self._by_head(k), self._by_head(v)
            if self.heads is not None:
                self.heads(op, self.kept[op.cache][0])
        return q.reshape(len(x), -1)

    def _turned(self, op: ops.RopeAppend, part: Array, norm: str | None) -> Array:
        """[M, heads · head_dim] → [M, heads, head_dim], normalized and rotated."""
        heads = part.reshape(len(part), -1, self.step.caches[op.cache].head_dim)
        rope = self.step.ropes[op.rope] if op.rope is not None else None

        def normed(heads: Array) -> Array:
            if norm is None:
                return heads
            flat = heads.reshape(len(heads), -1) if op.norm_all else heads
            return np.reshape(rms_norm(flat, self.w[norm], op.eps), heads.shape)

        heads = heads if op.norm_after else normed(heads)
        heads = heads if rope is None else rotate(heads, rope, self.positions)
        return normed(heads) if op.norm_after else heads

    def _by_head(self, x: Array) -> Array:
        """[windows · length, heads, head_dim] → [windows, heads, length, head_dim]."""
        return x.reshape(self.count, self.length, *x.shape[1:]).swapaxes(1, 2)

    def _attend(self, op: ops.Attend, x: Array) -> Array:
        cache = self.step.caches[op.cache]
        keys, values = self.kept[op.cache]
        heads = self._by_head(x.reshape(len(x), op.heads, cache.head_dim))
        q = heads.reshape(self.count, cache.kv_heads, -1, self.length, cache.head_dim)
        if self.heads is not None:
            self.heads(op, q)
        scores = q @ keys[:, :, None].swapaxes(-1, -2) * np.float32(op.scale)
        scores = capped(scores, op.softcap)
        back = np.arange(self.length)[:, None] - np.arange(self.length)
        hidden = (back < 0) | (back >= (op.window or self.length))
        scores += np.where(hidden, np.float32(-np.inf), np.float32(0))
        highest = scores.max(-1, keepdims=True)
        if op.sinks is not None:
            sinks = self.w[op.sinks].reshape(cache.kv_heads, -1, 1, 1)
            highest = np.maximum(highest, sinks)
        scores -= highest
        weights = np.exp(scores, out=scores)
        total = weights.sum(-1, keepdims=True)
        if op.sinks is not None:
            total = total + np.exp(sinks - highest)
        out = weights @ values[:, :, None] / total
        return np.ascontiguousarray(
            out.reshape(self.count, op.heads, self.length, -1).swapaxes(1, 2)
        ).reshape(len(x), -1)
