"""The calls that a step makes, in order: a list made once, when a model is loaded, and played at every step.

What a model's list leaves open is settled while this one is made: where the parts of a value lie, which of
them are cut and which are joined. Playing it is what a token costs the host, so nothing is looked up there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from nearfar.step.ops import Attend

Arrays = Sequence[mx.array]
"""Arrays [..., width] whose columns stand side by side."""

HEADS = -2
"""The axis of heads, where an array has one."""


class Run(Protocol):
    """One step's rows: where they stand, and the cache that they write and read."""

    @property
    def tokens(self) -> mx.array:
        """Token ids [..., L]."""
        ...

    def positions(self) -> mx.array:
        """Positions of the rows, float32 [..., L, 1]; 0 for padding."""
        ...

    def columns(self, x: mx.array, start: int, end: int) -> mx.array:
        """Columns [start, end) of x [..., L, width], or such heads of x [..., L, heads, head_dim]."""
        ...

    def rotate(self, rope: str, x: mx.array) -> mx.array:
        """Heads [..., L, heads, head_dim] turned by their rows' positions, by the table of that name."""
        ...

    def append(self, cache: int, keys: mx.array, values: mx.array) -> None:
        """Store keys and values [..., L, kv_heads, head_dim] of all rows."""
        ...

    def attend(self, op: Attend, queries: mx.array, sinks: mx.array | None) -> mx.array:
        """Attention of queries [..., L, heads, head_dim], as [..., L, heads·head_dim]; sinks [heads]."""
        ...

    def choose(self, arrays: Arrays) -> list[mx.array]:
        """The rows whose logits are wanted. From here on the step has these rows only."""
        ...


Made = list[mx.array]
"""What a step has made so far, in the order of the calls."""
Call = Callable[[Made, Run], Arrays]
"""What one call adds to it."""


@dataclass(frozen=True)
class Part:
    """An array that every step makes: its place in Made, and its columns (or heads, where it has such)."""

    at: int
    width: int


Value = tuple[Part, ...]
"""A value of a model's list: parts that stand side by side. What several matrices made stays apart until
somebody reads it as one."""


class Calls:
    """The list. Each call adds as many arrays as it was said to."""

    def __init__(self) -> None:
        self.all: list[Call] = []
        self._made = 0

    def add(self, call: Call, *widths: int) -> Value:
        """One call more, which makes arrays of these widths."""
        first, self._made = self._made, self._made + len(widths)
        self.all.append(call)
        return tuple(Part(first + index, width) for index, width in enumerate(widths))

    def each(self, value: Value, call: Callable[[mx.array, Run], mx.array], columns_each: int = 1) -> Value:
        """Add the same call for each part of a value. `columns_each`: how many columns become one head."""

        def one(at: int) -> Call:
            return lambda made, run: (call(made[at], run),)

        return tuple(self.add(one(part.at), part.width // columns_each)[0] for part in value)

    def whole(self, value: Value, axis: int = -1) -> Part:
        """As one array: a call only where there are several parts."""
        if len(value) == 1:
            return value[0]
        places = [part.at for part in value]
        (joined,) = self.add(
            lambda made, run: (mx.concatenate([made[at] for at in places], axis=axis),),
            sum(part.width for part in value),
        )
        return joined

    def cut(self, value: Value, start: int, count: int) -> Value:
        """Columns or heads [start, start + count): a call only where a part does not lie within."""
        found: list[Part] = []
        for part in value:
            first, last = max(start, 0), min(start + count, part.width)
            if first < last:
                found.append(part if last - first == part.width else self._columns(part, first, last))
            start -= part.width
        return tuple(found)

    def _columns(self, part: Part, start: int, end: int) -> Part:
        at = part.at
        return self.add(lambda made, run: (run.columns(made[at], start, end),), end - start)[0]


def whole(arrays: Arrays, axis: int = -1) -> mx.array:
    """As one array."""
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=axis)
