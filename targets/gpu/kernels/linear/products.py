"""The inner loop of sums.py in float32: it makes weights of four columns once for all rows, and multiplies
them by inputs.

A code becomes a float32 without a conversion (see vectors.ColumnReader.weight), and is used at its place in
the word. Scale and bias stay out of this loop: its sums are Σ q·x and Σ x of a chunk.
"""

# mypy: ignore-errors
# TVMScript: what is written here are statements of the kernel that is being parsed.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.common import fma
from nearfar.targets.gpu.kernels.linear.lookup import Lookup
from nearfar.targets.gpu.kernels.script.text import local_array
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, ColumnReader, at, clear, spread, total

F32X4, U32X4 = f"float32x{WIDTH}", f"uint32x{WIDTH}"


@dataclass(frozen=True)
class Inputs:
    """The inputs of a product.

    `read(i, vector)`: four inputs of row i, float32. `norm`: the norm's weights as vectors, or None.
    """

    read: Callable[[int, Any], Any]
    norm: Any

    def load(self, xs, place: int, i: int, vector, square, j: int) -> None:
        """Load four inputs into xs[place], times the norm's weights; add their squares before that to
        square[j].
        """
        T.buffer_store(xs, self.read(i, vector), [place])
        if self.norm is not None:
            T.buffer_store(square, fma(xs[place], xs[place], square[j]), [j])
            T.buffer_store(xs, xs[place] * self.norm[vector], [place])


@dataclass(frozen=True)
class ChunkSums:
    """A lane's sums over a chunk: `dot` Σ q·x, float32x4 [m · sides]; `xsum` Σ x, `square` Σ x² before the
    norm's weights, float32 [m].
    """

    dot: Any
    xsum: Any
    square: Any


class TileProducts:
    """Products of `m` rows with chunks of `units` units; `sides`: a lane's vectors of columns."""

    centre = 0
    """The amount by which codes with biases are too small in `dot`."""

    def __init__(self, m: int, sides: int, units: int, matrix: Matrix) -> None:
        self.m, self.sides, self.units, self.matrix = m, sides, units, matrix
        self.biased = matrix.quantized and matrix.scales.offsets
        """Whether sums of inputs are needed; without biases `dot` has the sums of centred codes."""
        self.reader = ColumnReader.of(matrix)
        self.lookup = Lookup(matrix)
        self.vectors = self.reader.inputs // WIDTH
        self.chunk_words = units * self.reader.words

    def declare(self) -> None:
        """Declare the lane's arrays, and the values of the matrix's table."""
        self.lookup.declare()
        self.xs = local_array("xs", self.m, F32X4)
        self.added = local_array("added", self.m, F32X4)
        self.squares = local_array("added_squares", self.m, F32X4)
        self.weights = local_array("weights", WIDTH, F32X4)
        self.lifted = local_array("lifted", 2 * self.sides, U32X4)

    def chunk(self, sums: ChunkSums, inputs: Inputs, word, start: int, first) -> None:
        """Compute a chunk: its words begin at word[start], side after side; `first` is its first vector of
        inputs.
        """
        clear(sums.dot, self.m * self.sides)
        clear(self.added, self.m)
        clear(self.squares, self.m)
        for unit in range(self.units):
            for v in range(self.vectors):
                for i in range(self.m):
                    inputs.load(self.xs, i, i, first + (unit * self.vectors + v), self.squares, i)
                    if self.biased:
                        T.buffer_store(self.added, self.added[i] + self.xs[i], [i])
                for side in range(self.sides):
                    place = start + side * self.chunk_words + unit * self.reader.words
                    self._add(sums, [word[place + i] for i in range(self.reader.words)], side, v)
        for i in range(self.m):
            T.buffer_store(sums.xsum, total(self.added[i]), [i])
            T.buffer_store(sums.square, total(self.squares[i]), [i])

    def _weight(self, words: list, e: int, lifted: list):
        """Weight or code `e` of a unit, or the value of its code in the matrix's table."""
        if self.lookup.table:
            return self.lookup.of(self.reader.whole(words, e))
        return self.reader.weight(words, e, lifted)

    def _add(self, sums: ChunkSums, words: list, side: int, v: int) -> None:
        """Add the products of vector `v` of a unit."""
        lifted = [self.lifted[2 * side], self.lifted[2 * side + 1]]
        if self.reader.placed and not self.lookup.table:
            for half in range(2):
                if v == half * self.vectors // 2:
                    T.buffer_store(self.lifted, self.reader.lift(words, half), [2 * side + half])
        for place in range(WIDTH):
            T.buffer_store(self.weights, self._weight(words, v * WIDTH + place, lifted), [place])
        for i in range(self.m):
            added = sums.dot[i * self.sides + side]
            for place in range(WIDTH):
                added = fma(self.weights[place], spread(at(self.xs[i], place)), added)
            T.buffer_store(sums.dot, added, [i * self.sides + side])
