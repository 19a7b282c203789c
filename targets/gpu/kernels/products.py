"""The inner loop of sums.py in float32: weights of four columns, each made once for all rows, times inputs.

A code becomes a float32 without a conversion (see vectors.Reader.weight), and is used where it is; scale and
bias stay out of this loop: its sums are Σ q·x and Σ x of a chunk.
"""

# mypy: ignore-errors
# TVMScript: what is written here are statements of the kernel that is being parsed.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from nearfar.targets.quantized import Matrix

from .script import local_array
from .vectors import WIDTH, Reader, at, clear, fma, or_zero, spread

F32X4, U32X4 = f"float32x{WIDTH}", f"uint32x{WIDTH}"


@dataclass(frozen=True)
class Inputs:
    """Where the inputs of a product come from, and what is done to them.

    `read(i, vector)`: four inputs of row i, float32. `norm`: the norm's weights as vectors, or None.
    `ragged`: some chunks are beyond the last; theirs count as zero.
    """

    read: Callable[[int, Any], Any]
    norm: Any
    ragged: bool

    def load(self, xs, at_place: int, i: int, vector, valid, square) -> None:
        """Four inputs into xs[at_place], times the norm's weights; their squares before that to square[i]."""
        value = self.read(i, vector)
        T.buffer_store(xs, or_zero(valid, value) if self.ragged else value, [at_place])
        if self.norm is not None:
            T.buffer_store(square, fma(xs[at_place], xs[at_place], square[i]), [i])
            T.buffer_store(xs, xs[at_place] * self.norm[vector], [at_place])


@dataclass(frozen=True)
class ChunkSums:
    """What the chunks of a lane add up: `dot` Σ q·x [m · sides], `xsum` Σ x and `square` Σ x² [m], float32x4.

    `square` goes on from chunk to chunk; lanes of `xsum` and `square` are to be added up.
    """

    dot: Any
    xsum: Any
    square: Any


class Products:
    """Products of `m` rows with chunks of `units` units; `sides` vectors of columns of a lane."""

    centre = 0
    """What codes are short of in `dot`."""

    def __init__(self, m: int, sides: int, units: int, matrix: Matrix) -> None:
        self.m, self.sides, self.units, self.matrix = m, sides, units, matrix
        self.reader = Reader.of(matrix)
        self.vectors = self.reader.inputs // WIDTH
        self.chunk_words = units * self.reader.words

    def declare(self) -> None:
        """The lane's arrays."""
        self.xs = local_array("xs", self.m, F32X4)
        self.weights = local_array("weights", WIDTH, F32X4)
        self.lifted = local_array("lifted", 2 * self.sides, U32X4)

    def chunk(self, sums: ChunkSums, inputs: Inputs, word, start: int, first, valid) -> None:
        """All of a chunk: its words from word[start] on, side after side; its first vector of inputs."""
        clear(sums.dot, self.m * self.sides)
        clear(sums.xsum, self.m)
        for unit in range(self.units):
            for v in range(self.vectors):
                for i in range(self.m):
                    inputs.load(self.xs, i, i, first + (unit * self.vectors + v), valid, sums.square)
                    if self.matrix.quantized:
                        T.buffer_store(sums.xsum, sums.xsum[i] + self.xs[i], [i])
                for side in range(self.sides):
                    place = start + side * self.chunk_words + unit * self.reader.words
                    self._add(sums, [word[place + i] for i in range(self.reader.words)], side, v)

    def _add(self, sums: ChunkSums, words: list, side: int, v: int) -> None:
        """Products of vector `v` of a unit."""
        lifted = [self.lifted[2 * side], self.lifted[2 * side + 1]]
        if self.reader.placed:
            for half in range(2):
                if v == half * self.vectors // 2:
                    T.buffer_store(self.lifted, self.reader.lift(words, half), [2 * side + half])
        for place in range(WIDTH):
            T.buffer_store(self.weights, self.reader.weight(words, v * WIDTH + place, lifted), [place])
        for i in range(self.m):
            added = sums.dot[i * self.sides + side]
            for place in range(WIDTH):
                added = fma(self.weights[place], spread(at(self.xs[i], place)), added)
            T.buffer_store(sums.dot, added, [i * self.sides + side])
