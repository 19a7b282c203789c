"""The shapes that the records of ops.py use to compute the width of their results and to find what does not
fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nearfar.step.params import Param

Parts = Literal["kv", "k", "state"]
"""What a cache keeps. "kv": keys and values by position. "k": one tensor by position. "state": one matrix
[depth, head_dim] a head, behind the last position of a column; it is float32, and so is "k".
"""


class CacheShape(Protocol):
    """The sizes of a cache."""

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys, and of values."""
        ...

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        ...

    @property
    def parts(self) -> Parts:
        """What the cache keeps."""
        ...

    @property
    def depth(self) -> int:
        """Rows of a head's state; 0 in a cache without a state."""
        ...


@dataclass(frozen=True)
class Shapes:
    """The shapes that are known before an operation. `widths`: columns of the values made so far; `ropes`:
    the names of the tables of rotations.

    Each method yields the ends of sentences that begin with the operation, one for each thing that does not
    fit.
    """

    params: Mapping[str, Param]
    caches: Sequence[CacheShape]
    ropes: Collection[str]
    widths: dict[str, int] = field(default_factory=dict)

    def wide(self, value: str, columns: int) -> Iterator[str]:
        """`value` must have `columns` columns."""
        if self.widths[value] != columns:
            yield f"reads {value} of {self.widths[value]} columns, and needs {columns}"

    def long(self, vector: str, groups: int, columns: int) -> Iterator[str]:
        """`groups` times the length of a vector must be `columns`."""
        if (found := self.params[vector].n) * groups != columns:
            needed = f"{columns} / {groups}" if groups > 1 else f"{columns}"
            yield f"reads {vector} of {found} values, and needs {needed}"

    def product(self, x: str, matrix: str, bias: str | None) -> Iterator[str]:
        """The matrix must have as many inputs as x has columns; a bias must have a value for each row of the
        matrix.
        """
        if (k := self.params[matrix].k) != self.widths[x]:
            yield f"multiplies {x}, of {self.widths[x]} columns, by {matrix}, of {k} inputs"
        if bias is not None:
            yield from self.long(bias, 1, self.params[matrix].n)

    def kept(self, cache: int, parts: Parts) -> Iterator[str]:
        """The cache must keep `parts`."""
        if (found := self.caches[cache].parts) != parts:
            yield f"uses cache {cache}, which keeps {found}, and needs {parts}"

    def grouped(self, heads: int, cache: int) -> Iterator[str]:
        """The number of query heads must be a multiple of the number of key heads."""
        if heads % (kv_heads := self.caches[cache].kv_heads):
            yield f"has {heads} heads for {kv_heads} heads of keys"
