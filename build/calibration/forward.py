"""Runs calibration windows through a step, one stretch at a time: all windows pass a stretch before the next
one's weights are read, so that memory holds one stretch's weights and the values between two stretches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nearfar.build.calibration.arithmetic import Array
from nearfar.build.calibration.operations import Update, attention, compute
from nearfar.step import ops
from nearfar.step.model import Step
from nearfar.step.operation import Op, caches_of, multiplied_by, reads, weights_of

MOST_LIVE = 3
"""The most values that may pass from one stretch to the next; a stretch ends where no more are needed later.
"""
BLOCK_TOKENS = 2048
"""About how many tokens go through a stretch together."""

Weights = Mapping[str, Array]
Watch = Callable[[str, Array], None]
"""Callback that gets a matrix's name and its inputs [rows, k], block by block."""
Choose = Callable[[str, int, Array], None]
"""Callback that gets the name of a stack, an expert, and the inputs [rows, k] of the expert, by blocks."""
Heads = Callable[[ops.RopeAppend | ops.Attend, Array], None]
"""Callback that gets, block by block, the appended keys [windows, kv_heads, length, head_dim] and the queries
of attention [windows, kv_heads, heads of each, length, head_dim].
"""


@dataclass(frozen=True)
class Stretch:
    """Consecutive operations of a step. `params`: the weights that they read; `live`: the values, made here
    or earlier, that later stretches read.
    """

    ops: tuple[Op, ...]
    params: tuple[str, ...]
    live: tuple[str, ...]


def stretches(step: Step) -> list[Stretch]:
    """Cut the step into stretches, where few values and no cache are needed afterwards."""
    last: dict[str, int] = {}
    shared: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        for name in reads(op):
            last[name] = index
        shared |= dict.fromkeys(caches_of(op), index)
    out: list[Stretch] = []
    made: list[str] = []
    begun: set[int] = set()
    start = 0
    for index, op in enumerate(step.ops):
        made.append(op.out)
        begun.update(caches_of(op))
        live = tuple(name for name in made if last.get(name, -1) > index)
        ends = index == len(step.ops) - 1
        if ends or (
            isinstance(op, ops.Add)
            and len(live) <= MOST_LIVE
            and all(shared[cache] <= index for cache in begun)
        ):
            part = step.ops[start : index + 1]
            names = dict.fromkeys(name for op in part for name in weights_of(op))
            out.append(Stretch(part, tuple(names), live))
            start, made = index + 1, list(live)
    return out


class Forward:
    """The state of windows of tokens, int [windows, length], between two stretches; each window is a sequence
    of its own.
    """

    def __init__(self, step: Step, windows: Array) -> None:
        self.step, self.windows = step, windows
        self.live: dict[str, Array] = {}
        """What the last stretch left: float32 [windows · length, width]."""

    def copy(self) -> Forward:
        """Copy the state, so that both copies can go on from the same stretch."""
        other = Forward(self.step, self.windows)
        other.live = dict(self.live)
        return other

    @staticmethod
    def together(some: Iterable[Forward]) -> Forward:
        """Concatenate the windows of several forwards that have reached the same stretch."""
        parts = list(some)
        other = Forward(parts[0].step, np.concatenate([part.windows for part in parts]))
        other.live = {name: np.concatenate([part.live[name] for part in parts]) for name in parts[0].live}
        return other

    def thinned(self, every: int) -> Forward:
        """Keep each `every`-th token of a window only, for a stretch that does not attend to other tokens."""
        count, length = self.windows.shape
        other = Forward(self.step, self.windows[:, every - 1 :: every])
        other.live = {
            name: value.reshape(count, length, -1)[:, every - 1 :: every].reshape(other.windows.size, -1)
            for name, value in self.live.items()
        }
        return other

    def watch(self, stretch: Stretch, weights: Weights, watch: Watch, choose: Choose | None = None) -> None:
        """Run a stretch to watch the inputs of matrices and experts; the state stays before the stretch."""
        for _, _ in self._blocks(stretch, weights, watch, choose=choose):
            pass

    def advance(
        self,
        stretch: Stretch,
        weights: Weights,
        watch: Watch | None = None,
        heads: Heads | None = None,
        choose: Choose | None = None,
    ) -> None:
        """Run a stretch and keep its live values for the next one."""
        found: dict[str, list[Array]] = {name: [] for name in stretch.live}
        for _, values in self._blocks(stretch, weights, watch, heads, choose):
            for name, parts in found.items():
                parts.append(values[name])
        self.live = {name: np.concatenate(parts) for name, parts in found.items()}

    def finish(self, stretch: Stretch, weights: Weights) -> Iterator[Array]:
        """Run the last stretch: logits [rows, vocab], block by block."""
        for _, values in self._blocks(stretch, weights, None):
            yield values[stretch.ops[-1].out]

    def _blocks(
        self,
        stretch: Stretch,
        weights: Weights,
        watch: Watch | None,
        heads: Heads | None = None,
        choose: Choose | None = None,
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        count, length = self.windows.shape
        size = max(1, BLOCK_TOKENS // length)
        for start in range(0, count, size):
            tokens = self.windows[start : start + size]
            rows = slice(start * length, start * length + tokens.size)
            values = {name: value[rows] for name, value in self.live.items()}
            _Block(self.step, tokens, weights, values, watch, heads, choose).run(stretch.ops)
            yield start, values


class _Block:
    """Some windows on their way through one stretch: a Run of operations.py."""

    def __init__(
        self,
        step: Step,
        tokens: Array,
        weights: Weights,
        values: dict[str, Array],
        watch: Watch | None,
        heads: Heads | None,
        choose: Choose | None,
    ) -> None:
        self.step, self.weights, self.values = step, weights, values
        self._watch, self._heads, self._choose = watch, heads, choose
        self._count, self._length = tokens.shape
        self.tokens = tokens.reshape(-1)
        self.positions = np.tile(np.arange(self._length), self._count)
        self._back = np.arange(self._length)[:, None] - np.arange(self._length)
        """How far before a row each position of its window lies: int [length, length]."""
        self._kept: dict[int, tuple[Array, Array]] = {}
        """Keys and values of a cache: [windows, kv_heads, length, head_dim]."""

    def run(self, part: Sequence[Op]) -> None:
        """Compute the operations. The last one is skipped where only the inputs of matrices are watched."""
        for op in part:
            if self._watch is not None:
                for matrix in multiplied_by(op):
                    for name in reads(op):
                        self._watch(matrix, self.values[name])
                if op.ends:
                    return
            self.values[op.out] = compute(self, op)

    def choose(self, stack: str, expert: int, x: Array) -> None:
        """See Run."""
        if self._choose is not None:
            self._choose(stack, expert, x)

    def append(self, op: ops.RopeAppend, keys: Array, values: Array) -> None:
        """See Run."""
        self._kept[op.cache] = self._by_head(keys), self._by_head(values)
        if self._heads is not None:
            self._heads(op, self._kept[op.cache][0])

    def attend(self, op: ops.Attend, queries: Array) -> Array:
        """See Run."""
        keys, values = self._kept[op.cache]
        kv_heads, head_dim = keys.shape[1], keys.shape[-1]
        q = self._by_head(queries).reshape(self._count, kv_heads, -1, self._length, head_dim)
        if self._heads is not None:
            self._heads(op, q)
        seen = (self._back >= 0) & (self._back < (op.window or self._length))
        sinks = None if op.sinks is None else self.weights[op.sinks]
        out = attention(op, q, keys, values, sinks, seen).reshape(self._count, op.heads, self._length, -1)
        return np.ascontiguousarray(out.swapaxes(1, 2)).reshape(len(queries), -1)

    def before(self, op: ops.Conv, x: Array) -> Array:
        """See Run."""
        whole = x.reshape(self._count, self._length, -1)
        padded = np.pad(whole, ((0, 0), (op.taps - 1, 0), (0, 0)))
        shifted = [padded[:, tap : tap + self._length] for tap in range(op.taps)]
        return np.stack(shifted, 2).reshape(len(x), op.taps, -1)

    def recur(self, cache: int, update: Update) -> None:
        """See Run."""
        shape, first = self.step.caches[cache], np.arange(self._count) * self._length
        state: Array = np.zeros((self._count, shape.kv_heads, shape.depth, shape.head_dim), np.float32)
        for position in range(self._length):
            state = update(first + position, state)

    def wanted(self, x: Array) -> Array:
        """Give all rows: a calibration computes every position."""
        return x

    def _by_head(self, x: Array) -> Array:
        """[windows · length, heads, head_dim] → [windows, heads, length, head_dim]."""
        return x.reshape(self._count, self._length, *x.shape[1:]).swapaxes(1, 2)
