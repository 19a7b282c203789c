"""Weights as the step names them, and the checkpoint's tensors that they are made of."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RotaryOrder:
    """The order of a projection's rows that makes every rotation one of half-split pairs (i, i + head_dim/2).

    Of each head `rotary` values are rotated: as pairs (i, i + rotary/2), or `interleaved` as (2i, 2i+1). The
    rest are not; in the table of frequencies they are pairs of frequency 0. Queries and keys are permuted
    alike, so that their products stay.
    """

    head_dim: int
    rotary: int
    interleaved: bool = False

    @property
    def trivial(self) -> bool:
        """Whether nothing moves."""
        return not self.interleaved and self.rotary == self.head_dim

    def head(self) -> list[int]:
        """For each place in a head, the row that comes there."""
        half, turning = self.head_dim // 2, self.rotary // 2
        rest = list(range(self.rotary, self.head_dim))
        if self.interleaved:
            first, second = list(range(0, self.rotary, 2)), list(range(1, self.rotary, 2))
        else:
            first, second = list(range(turning)), list(range(turning, self.rotary))
        return first + rest[: half - turning] + second + rest[half - turning :]

    def rows(self, count: int) -> list[int]:
        """For so many rows of whole heads."""
        head = self.head()
        return [start + row for start in range(0, count, self.head_dim) for row in head]


@dataclass(frozen=True)
class Piece:
    """Rows [start, start + rows) of a tensor of the checkpoint; `order`: brought into another order."""

    tensor: str
    rows: int
    start: int = 0
    order: RotaryOrder | None = None


@dataclass(frozen=True)
class Param:
    """One weight: a matrix [n, k], or a float32 vector [n] where `k` is 0: the rows of its pieces, one piece
    after the other.

    A vector is offset + scale · what the checkpoint has.
    """

    name: str
    pieces: tuple[Piece, ...]
    k: int = 0
    offset: float = 0.0
    scale: float = 1.0

    @property
    def n(self) -> int:
        """Rows in all."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def is_matrix(self) -> bool:
        """Whether it can be quantized."""
        return self.k > 0

    @property
    def tensors(self) -> dict[str, int]:
        """The tensors that it is made of, in order, with their rows. A parameter takes all rows of a
        tensor, or several do.
        """
        out: dict[str, int] = {}
        for piece in self.pieces:
            out[piece.tensor] = max(out.get(piece.tensor, 0), piece.start + piece.rows)
        return out

    @property
    def order(self) -> list[int] | None:
        """For each of its rows, which row of its `tensors`, one whole after the other, comes there; None: as
        they lie. Pieces may lie in a tensor in another order, apart, or use a row twice.
        """
        tensors, first, stacked = self.tensors, {}, 0
        for tensor, count in tensors.items():
            first[tensor], stacked = stacked, stacked + count
        starts = [first[piece.tensor] + piece.start for piece in self.pieces]
        before = [0, *itertools.accumulate(piece.rows for piece in self.pieces)]
        turned = any(piece.order is not None and not piece.order.trivial for piece in self.pieces)
        if not turned and [*starts, stacked] == before:
            return None
        rows: list[int] = []
        for piece, start in zip(self.pieces, starts, strict=True):
            moved = piece.order.rows(piece.rows) if piece.order is not None else range(piece.rows)
            rows += [start + row for row in moved]
        return rows

    def folded(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A vector as the step reads it, of its `tensors` one after the other: its rows in order, scaled and
        shifted.
        """
        moved = values if self.order is None else values[np.array(self.order)]
        if self.scale == 1.0 and self.offset == 0.0:
            return moved
        return np.asarray(moved * np.float32(self.scale) + np.float32(self.offset), np.float32)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        return {name: (rows, self.k) if self.is_matrix else (rows,) for name, rows in self.tensors.items()}
