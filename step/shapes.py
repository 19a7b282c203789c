"""Shapes of what a list of operations names. The records of ops.py use them to say how wide their results are
and what does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nearfar.step.params import Param


class CacheShape(Protocol):
    """Heads of a cache of keys and values."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys, and of values."""
        ...

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        ...


@dataclass(frozen=True)
class Shapes:
    """What is known before an operation. `widths`: columns of the values made so far; `ropes`: the names of
    the tables of rotations.

    The methods give ends of sentences that begin with the operation, for what is not as it has to be.
    """

    params: Mapping[str, Param]
    caches: Sequence[CacheShape]
    ropes: Collection[str]
    widths: dict[str, int] = field(default_factory=dict)

    def wide(self, value: str, columns: int) -> Iterator[str]:
        """A value must have so many columns."""
        if self.widths[value] != columns:
            yield f"reads {value} of {self.widths[value]} columns, and needs {columns}"

    def long(self, vector: str, groups: int, columns: int) -> Iterator[str]:
        """`groups` times a vector must be as long as so many columns."""
        if (found := self.params[vector].n) * groups != columns:
            needed = f"{columns} / {groups}" if groups > 1 else f"{columns}"
            yield f"reads {vector} of {found} values, and needs {needed}"

    def product(self, x: str, matrix: str, bias: str | None) -> Iterator[str]:
        """A matrix must have as many inputs as x has columns, and a bias as many values as it has rows."""
        if (k := self.params[matrix].k) != self.widths[x]:
            yield f"multiplies {x}, of {self.widths[x]} columns, by {matrix}, of {k} inputs"
        if bias is not None:
            yield from self.long(bias, 1, self.params[matrix].n)

    def grouped(self, heads: int, cache: int) -> Iterator[str]:
        """Heads of queries must be a multiple of the heads of keys."""
        if heads % (kv_heads := self.caches[cache].kv_heads):
            yield f"has {heads} heads for {kv_heads} heads of keys"
