"""Rows of inputs as integers of 16 bits, which products of integers multiply (dot.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import LARGEST, DotSums

Expr = Any
ValueAt = Callable[[Expr], Expr]
WORDS = 8
"""The words of sixteen inputs."""
NUMBERS = 2
"""A group's scale, and the sum of its inputs."""


@dataclass(frozen=True)
class Rounding:
    """One way of rounding rows: in groups, in the words that `dot` multiplies.

    `corrections`: factors of the sum of a group's integers, of all products that read these rows.
    """

    dot: DotSums
    corrections: tuple[int, ...]

    @staticmethod
    def of(dots: Sequence[DotSums]) -> list[Rounding]:
        """The roundings that some products of one unit need: one for each group size."""
        first = {dot.matrix.group: dot for dot in reversed(dots)}
        return [
            Rounding(dot, tuple(sorted({d.correction for d in dots if d.matrix.group == group} - {0})))
            for group, dot in first.items()
        ]

    def scratch(self, rows: int) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the words and of the numbers of `rows` rows.

        Rows of a tile are interleaved into one stream, whatever k is (rows 16 KiB apart would share a set of
        the L1 cache).
        """
        k, tile = self.dot.matrix.k, self.dot.rows
        numbers = (k // self.dot.matrix.group, NUMBERS + len(self.corrections), tile)
        return [((rows // tile, k // 2 * tile), "int32"), ((rows // tile, *numbers), "float32")]

    def inputs(self, words: Expr, numbers: Expr) -> Rounded:
        """The rounded rows in these buffers."""
        return Rounded(words, numbers, self.corrections)

    def write(self, value_at: ValueAt, m: Expr, words: Expr, numbers: Expr) -> None:
        """Round a row of inputs as row m; `value_at` gives sixteen of its values from one on.

        16 bits instead of the usual 8 keep the error (2^-16 of a group's largest value) below that of float32
        sums over the row, so that greedy text equals that of float32 on the dequantized weights. linear_quant
        states the cost.
        """
        dot, tile, group = self.dot, self.dot.rows, self.dot.matrix.group
        t, r = (m, v.i32(0)) if tile == 1 else (T.Bind(m // tile), T.Bind(m % tile))
        with T.serial(0, dot.matrix.k // group) as g:
            for i, held in enumerate(self._group(value_at, t, g, r, numbers)):
                first = (g * group + i * v.LANES) // 2 * tile
                if tile == 1:
                    v.put(words, [t, first], held, WORDS)
                    continue
                for j in range(WORDS):
                    v.put1(words, [t, first + dot.place(j, r)], tirx.Shuffle([held], [j]))

    def write_tile(self, values: Sequence[ValueAt], t: Expr, words: Expr, numbers: Expr) -> None:
        """Round the rows of tile t, two or four, whose words are neighbours; see `write`.

        Storing word by word took 1.2 to 1.5 times as long.
        """
        group = self.dot.matrix.group
        with T.serial(0, self.dot.matrix.k // group) as g:
            rows = [self._group(value_at, t, g, v.i32(r), numbers) for r, value_at in enumerate(values)]
            for i, held in enumerate(zip(*rows, strict=True)):
                first = (g * group + i * v.LANES) // 2 * len(rows)
                order = [r * WORDS + j for j in range(WORDS) for r in range(len(rows))]
                for half in range(0, len(order), v.LANES):
                    some = T.Bind(tirx.Shuffle(list(held), order[half : half + v.LANES]))
                    v.put(words, [t, first + half], some)

    def _group(self, value_at: ValueAt, t: Expr, g: Expr, r: Expr, numbers: Expr) -> list[Expr]:
        """Write the numbers of a group of row r of tile t, and give its words, eight for sixteen inputs."""
        group = self.dot.matrix.group
        regs = [value_at(g * group + i) for i in range(0, group, v.LANES)]
        total, largest = regs[0], tirx.abs(regs[0])
        for value in regs[1:]:
            total, largest = T.Bind(total + value), T.Bind(tirx.max(largest, tirx.abs(value)))
        amax = v.hmax(largest)
        inverse = T.Bind(tirx.Select(amax > v.f32(0.0), v.f32(LARGEST) / amax, v.f32(0.0)))
        v.put1(numbers, [t, g, 0, r], amax * v.f32(1.0 / LARGEST))
        v.put1(numbers, [t, g, 1, r], v.hsum(total))
        integers = [T.Bind(v.cast(tirx.nearbyint(value * v.splat(inverse)), v.I32X16)) for value in regs]
        if self.corrections:
            whole = functools.reduce(lambda a, b: T.Bind(a + b), integers)
            count = v.hreduce(whole, lambda a, b: a + b, "int32")
            for i, factor in enumerate(self.corrections):
                product = T.Bind(count * v.i32(factor))
                v.put1(numbers, [t, g, NUMBERS + i, r], v.bits(product, "float32"))
        return [self.dot.inputs(value) for value in integers]


@dataclass(frozen=True)
class Rounded:
    """Rounded rows: their words, and the numbers of each group (Rounding.write)."""

    words: Expr
    numbers: Expr
    corrections: tuple[int, ...]

    def scale(self, t: Expr, g: Expr, row: int) -> Expr:
        """The scale of a group of a row of a tile, float32."""
        return self.numbers[t, g, 0, row]

    def sum(self, t: Expr, g: Expr, row: int) -> Expr:
        """The sum of a group's inputs, float32."""
        return self.numbers[t, g, 1, row]

    def correction(self, factor: int, t: Expr, g: Expr, row: int) -> Expr:
        """The sum of a group's integers times a factor, int32."""
        return T.Bind(v.bits(self.numbers[t, g, NUMBERS + self.corrections.index(factor), row], "int32"))
