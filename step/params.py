"""Parameters: the weights that a step names, and the checkpoint's tensors that they are made of."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RotaryOrder:
    """The order of a projection's rows that turns every rotation into one of half-split pairs (i, i +
    head_dim/2).

    In each head, `rotary` values rotate: as pairs (i, i + rotary/2), or `interleaved` as (2i, 2i+1). The
    others do not; in the table of frequencies they are pairs of frequency 0. Queries and keys are permuted
    alike, so their products do not change.
    """

    head_dim: int
    rotary: int
    interleaved: bool = False

    @property
    def trivial(self) -> bool:
        """Whether the order leaves every row in its place."""
        return not self.interleaved and self.rotary == self.head_dim

    def head(self) -> list[int]:
        """For each place in a head, the index of the row that moves there."""
        half, turning = self.head_dim // 2, self.rotary // 2
        rest = list(range(self.rotary, self.head_dim))
        if self.interleaved:
            first, second = list(range(0, self.rotary, 2)), list(range(1, self.rotary, 2))
        else:
            first, second = list(range(turning)), list(range(turning, self.rotary))
        return first + rest[: half - turning] + second + rest[half - turning :]

    def rows(self, count: int) -> list[int]:
        """For each of `count` rows (whole heads), the index of the row that moves there."""
        head = self.head()
        return [start + row for start in range(0, count, self.head_dim) for row in head]


@dataclass(frozen=True)
class TensorPiece:
    """Rows [start, start + rows) of a checkpoint's tensor; `order`: the order they are brought into.

    `stack`: the number of matrices in the tensor, [stack, rows/stack, k] or, as a vector,
    [stack, rows/stack]; 0: one, without that dimension. `transposed`: each matrix is stored input by input,
    [k, n]. `scale`: of a vector, a factor of the piece's values.
    """

    tensor: str
    rows: int
    start: int = 0
    order: RotaryOrder | None = None
    stack: int = 0
    transposed: bool = False
    scale: float = 1.0

    def shape(self, rows: int, k: int) -> tuple[int, ...]:
        """The shape of the whole tensor of `rows` rows with `k` inputs (0: a vector)."""
        if not k:
            return (self.stack, rows // self.stack) if self.stack else (rows,)
        n = rows // (self.stack or 1)
        matrix = (k, n) if self.transposed else (n, k)
        return (self.stack, *matrix) if self.stack else matrix


@dataclass(frozen=True)
class Param:
    """One weight: a matrix [n, k], or, if `k` is 0, a float32 vector [n]; its pieces follow one another.

    The values of a vector are offset + scale · the checkpoint's, times the scales of its pieces. `stack`: a
    matrix is `stack` matrices [n/stack, k], one below the other, of which a step multiplies by some
    (experts). `floats`: a matrix is quantized only if the checkpoint has its codes (routers, whose rounded
    logits would choose other experts).
    """

    name: str
    pieces: tuple[TensorPiece, ...]
    k: int = 0
    offset: float = 0.0
    scale: float = 1.0
    stack: int = 1
    floats: bool = False

    @property
    def n(self) -> int:
        """The number of rows of all pieces."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a matrix, which can be quantized."""
        return self.k > 0

    @property
    def tensors(self) -> dict[str, int]:
        """The tensors that the parameter is made of, in order, with their rows.

        Each row of a tensor is used by this parameter or by another one that names the same tensor.
        """
        out: dict[str, int] = {}
        for piece in self.pieces:
            out[piece.tensor] = max(out.get(piece.tensor, 0), piece.start + piece.rows)
        return out

    def piece(self, tensor: str) -> TensorPiece:
        """The first piece of a tensor; all pieces of a tensor agree about how it is stored."""
        return next(piece for piece in self.pieces if piece.tensor == tensor)

    @property
    def order(self) -> list[int] | None:
        """For each row of the parameter, its index in the `tensors` stacked one after the other; None: the
        rows are in place.

        Pieces may be in a tensor in another order, be apart, or use a row twice.
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
        """A vector as the step reads it: `values`, its `tensors` one after the other, with rows in order,
        scaled and shifted.
        """
        moved = values if self.order is None else values[np.array(self.order)]
        if any(piece.scale != 1.0 for piece in self.pieces):
            scales = np.array([piece.scale for piece in self.pieces], np.float32)
            moved = moved * np.repeat(scales, [piece.rows for piece in self.pieces])
        if self.scale == 1.0 and self.offset == 0.0:
            return moved
        return np.asarray(moved * np.float32(self.scale) + np.float32(self.offset), np.float32)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that the parameter needs."""
        pieces = {piece.tensor: piece for piece in self.pieces}
        return {name: pieces[name].shape(rows, self.k) for name, rows in self.tensors.items()}
