"""The calls of a step in order: a list that is built once, when a model is loaded, and replayed at every
step.

Building it decides what the model's list leaves open: where the parts of a value are, and which of them are
split or concatenated. Replaying it is the host's cost of a token, so it looks nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from nearfar.step.ops import Attend

Arrays = Sequence[mx.array]
"""Arrays [..., width] whose columns are concatenated."""

HEADS = -2
"""The axis of heads in an array that has one."""


class StepContext(Protocol):
    """The rows of one step: their positions, and the cache that they write and read."""

    @property
    def tokens(self) -> mx.array:
        """Token ids [..., L]."""
        ...

    def positions(self) -> mx.array:
        """Positions of the rows, float32 [..., L, 1]; 0 for padding."""
        ...

    def columns(self, x: mx.array, start: int, end: int) -> mx.array:
        """Columns [start, end) of x [..., L, width], or heads [start, end) of x [..., L, heads, head_dim]."""
        ...

    def rotate(self, rope: str, x: mx.array) -> mx.array:
        """Rotate heads [..., L, heads, head_dim] by their rows' positions, with the rotary table `rope`."""
        ...

    def append(self, cache: int, keys: mx.array, values: mx.array) -> None:
        """Store keys and values [..., L, kv_heads, head_dim] of all rows."""
        ...

    def attend(self, op: Attend, queries: mx.array, sinks: mx.array | None) -> mx.array:
        """Attention of queries [..., L, heads, head_dim], as [..., L, heads·head_dim]; sinks [heads]."""
        ...

    def before(self, cache: int, taps: int, x: mx.array) -> mx.array:
        """Store x [..., L, width] of all rows, and return it for the last `taps` positions of each row,
        [..., L, taps, width]; 0 before position 0.
        """
        ...

    def recur(self, cache: int, parts: Arrays, rule: Rule) -> mx.array:
        """Apply a rule to the rows of parts [heads, L, …] in the order of positions, and keep its states.
        Returns [heads, L, width].
        """
        ...

    def choose(self, arrays: Arrays) -> list[mx.array]:
        """Select the rows whose logits are needed. From here on the step has only these rows."""
        ...


Rule = Callable[[mx.array, Arrays], tuple[mx.array, mx.array]]
"""A recurrence over rows of several sequences: takes the states before them [heads, B, depth, head_dim] and
parts of the rows [heads, B, T, …], returns results [heads, B, T, width] and the states behind the rows.
"""
Made = list[mx.array]
"""The arrays that a step has made so far, in the order of the calls."""
Call = Callable[[Made, StepContext], Arrays]
"""One call: takes the arrays made so far, and returns the arrays that it adds."""


@dataclass(frozen=True)
class ArrayRef:
    """An array that every step makes: its place in Made, and its number of columns (or heads)."""

    at: int
    width: int


Value = tuple[ArrayRef, ...]
"""A value of a model's list: parts whose columns are concatenated.

Results of several matrices stay apart until an operation reads them as one array.
"""


class Calls:
    """The list of calls. Each call adds as many arrays as were declared for it."""

    def __init__(self) -> None:
        self.all: list[Call] = []
        self._made = 0

    def add(self, call: Call, *widths: int) -> Value:
        """Add a call that makes arrays of these widths."""
        first, self._made = self._made, self._made + len(widths)
        self.all.append(call)
        return tuple(ArrayRef(first + index, width) for index, width in enumerate(widths))

    def each(
        self, value: Value, call: Callable[[mx.array, StepContext], mx.array], columns_each: int = 1
    ) -> Value:
        """Add the same call for each part of a value. `columns_each`: the number of columns that become one
        head.
        """

        def one(at: int) -> Call:
            return lambda made, run: (call(made[at], run),)

        return tuple(self.add(one(part.at), part.width // columns_each)[0] for part in value)

    def whole(self, value: Value, axis: int = -1) -> ArrayRef:
        """The value as one array; adds a call only if there are several parts."""
        if len(value) == 1:
            return value[0]
        places = [part.at for part in value]
        (joined,) = self.add(
            lambda made, run: (mx.concatenate([made[at] for at in places], axis=axis),),
            sum(part.width for part in value),
        )
        return joined

    def cut(self, value: Value, start: int, count: int) -> Value:
        """Columns or heads [start, start + count) of a value; adds a call only for a part that is not
        entirely inside.
        """
        found: list[ArrayRef] = []
        for part in value:
            first, last = max(start, 0), min(start + count, part.width)
            if first < last:
                found.append(part if last - first == part.width else self._columns(part, first, last))
            start -= part.width
        return tuple(found)

    def _columns(self, part: ArrayRef, start: int, end: int) -> ArrayRef:
        at = part.at
        return self.add(lambda made, run: (run.columns(made[at], start, end),), end - start)[0]


def whole(arrays: Arrays, axis: int = -1) -> mx.array:
    """Concatenate arrays along an axis."""
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=axis)
