"""The inner loop of sums.py in float16, two products in an instruction, for codes that are whole in a word.

A pair of codes half a word apart becomes a pair of float16 without a conversion: with the exponent of 1024,
eight bits of each half are an integer. A code that is masked at its place is its value times 2^place,
exactly, and the input is divided by 2^place. The middle of the codes is subtracted together with the 1024:
sums of numbers around zero are half as large, and so are their rounding errors.

No input up to 10^18 overflows, and no small one is lost. A block of 16 inputs is scaled to length LENGTH
before it becomes float16, and its sum is scaled back in float32. By Cauchy-Schwarz, no partial sum of
products of inputs with codes up to c from zero is larger than c·√16·LENGTH, 32,768 with codes of 8 bits; an
input that becomes subnormal is less than 2^-14 of its block's length. (Beyond 10^18 squares are infinite, and
the sum is NaN.) A block's sum is the sum of two chains of eight products. With normal inputs, with or without
outliers, an output is off by 6·10^-4 of the largest, and by at most 10^-3.
"""

# mypy: ignore-errors
# TVMScript: what is written here are statements of the kernel that is being parsed.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.common import fma
from nearfar.targets.gpu.kernels.linear.products import F32X4, U32X4, ChunkSums, Inputs, TileProducts
from nearfar.targets.gpu.kernels.script.text import local_array
from nearfar.targets.gpu.kernels.script.vectors import (
    WIDTH,
    ColumnReader,
    at,
    clear,
    f32x4,
    joined,
    spread,
    total,
)

BLOCK = 16
LENGTH = 64.0
TINY = 1e-30  # squares of a block that count as 0
FIELD = 8  # bits of a half that are lifted at a time: the mantissa has 10
HALF = 16  # bits of a float16
BOTH = 0x10001  # multiplies the bits of a half into both halves of a word
LIFTED, _EXPONENT = 1024, 0x6400  # the number whose last bit is 1, and its bits
F16X2, F16X4 = "float16x2", "float16x4"


def in_pairs(matrix: Matrix) -> bool:
    """Whether the codes of a matrix can be taken in pairs: values of a table do not stand in its words."""
    return matrix.scales.table is None and ColumnReader.of(matrix).placed


class Halves(TileProducts):
    """Products in pairs of float16; the docstring of the module explains them. See TileProducts."""

    def __init__(self, m: int, sides: int, units: int, matrix: Matrix) -> None:
        super().__init__(m, sides, units, matrix)
        self.block = max(size for size in range(1, BLOCK // self.reader.inputs + 1) if units % size == 0)
        """Units."""
        self.nested = FIELD // matrix.bits
        """Codes of a field."""
        self.centre = 1 << matrix.bits - 1
        self.apart = self.reader.inputs // 2
        """Inputs from one of a pair to the other."""
        self.pairs = self.block * self.apart

    def declare(self) -> None:
        """Declare the lane's arrays."""
        self.ys = local_array("ys", self.block * self.vectors, F32X4)
        self.added = local_array("added", 1, F32X4)
        self.size = local_array("size", 1, "float32")
        self.factor = local_array("factor", 1, F32X4)
        self.length = local_array("length", self.m, "float32")
        self.pair = local_array("pair", self.m * self.pairs, F16X2)
        self.field = local_array("field", 1, U32X4)
        self.code = local_array("code", 1, U32X4)
        self.weights = local_array("weights", 2, F16X4)
        self.chain = local_array("chain", self.m * self.sides * 2, F16X4)

    def chunk(self, sums: ChunkSums, inputs: Inputs, word, start: int, first) -> None:
        """Compute a chunk block by block; see TileProducts."""
        clear(sums.dot, self.m * self.sides)
        for i in range(self.m):
            T.buffer_store(sums.xsum, T.float32(0), [i])
            T.buffer_store(sums.square, T.float32(0), [i])
        for block in range(self.units // self.block):
            for i in range(self.m):
                self._bring(sums, inputs, i, first + block * self.block * self.vectors)
            for side in range(self.sides):
                for unit in range(self.block):
                    place = start + side * self.chunk_words + block * self.block + unit
                    for field in range(2):
                        self._add(word[place], side, unit, field)
                for i in range(self.m):
                    self._bring_back(sums, i, side)

    def _bring(self, sums: ChunkSums, inputs: Inputs, i: int, first) -> None:
        """Load a block of row i as pairs of float16, and keep its length in units of LENGTH."""
        ys, size, added, count = self.ys, self.size, self.added, self.block * self.vectors
        if inputs.norm is not None:
            clear(added, 1)
        for v in range(count):
            inputs.load(ys, v, i, first + v, added, 0)
        if inputs.norm is not None:
            T.buffer_store(sums.square, sums.square[i] + total(added[0]), [i])
        if self.biased:
            T.buffer_store(added, ys[0], [0])
            for v in range(1, count):
                T.buffer_store(added, added[0] + ys[v], [0])
            T.buffer_store(sums.xsum, sums.xsum[i] + total(added[0]), [i])
        T.buffer_store(added, ys[0] * ys[0], [0])
        for v in range(1, count):
            T.buffer_store(added, fma(ys[v], ys[v], added[0]), [0])
        T.buffer_store(size, T.max(total(added[0]), T.float32(TINY)), [0])
        T.buffer_store(self.length, T.sqrt(size[0]) * T.float32(1 / LENGTH), [i])
        T.buffer_store(size, T.rsqrt(size[0]) * T.float32(LENGTH), [0])
        T.buffer_store(self.factor, self._factors(size[0]), [0])
        for v in range(count):
            T.buffer_store(ys, ys[v] * self.factor[0], [v])
        for p in range(self.pairs):
            unit, e = divmod(p, self.apart)
            numbers = [unit * self.reader.inputs + place for place in (e, e + self.apart)]
            two = T.Shuffle([at(ys[place // WIDTH], place % WIDTH) for place in numbers], [0, 1])
            T.buffer_store(self.pair, T.Cast(F16X2, two), [i * self.pairs + p])

    def _factors(self, size):
        """The factors of four inputs: each undoes the power of two by which the masked code is too large."""
        if self.nested == 1:
            return spread(size)
        return joined([size * T.float32(0.5 ** (e % self.nested * self.matrix.bits)) for e in range(WIDTH)])

    def _add(self, word, side: int, unit: int, field: int) -> None:
        """Add the products of the codes in one of the two fields of each half of a word."""
        low = T.shift_right(word, _bits(FIELD)) if field else word
        # The sign bit is stored inverted, see packing.SIGN_BIT.
        exponent = _EXPONENT * BOTH ^ (field << HALF + FIELD - 1)
        T.buffer_store(self.field, (low & _bits(BOTH * ((1 << FIELD) - 1))) ^ _bits(exponent), [0])
        for e in range(self.nested):
            self._make(e)
            pair = unit * self.apart + field * self.nested + e
            first = unit == field == e == 0
            for i in range(self.m):
                x = self.pair[i * self.pairs + pair]
                x = T.Shuffle([x, x], [0, 1, 2, 3])
                for c in range(2):
                    place = (i * self.sides + side) * 2 + c
                    made = self.weights[c] * x if first else fma(self.weights[c], x, self.chain[place])
                    T.buffer_store(self.chain, made, [place])

    def _make(self, e: int) -> None:
        """Make code `e` of the field, minus the centre, times 2^place."""
        place = e * self.matrix.bits
        if self.nested > 1:
            kept = _EXPONENT | (1 << self.matrix.bits) - 1 << place
            T.buffer_store(self.code, self.field[0] & _bits(BOTH * kept), [0])
        code = self.code if self.nested > 1 else self.field
        offset = T.Broadcast(T.float16(float(LIFTED + (self.centre << place))), WIDTH)
        for c in range(2):  # columns 2c and 2c + 1: the pair of float16 in each column's word
            pairs = T.reinterpret(F16X4, T.Shuffle([code[0]], [2 * c, 2 * c + 1]))
            T.buffer_store(self.weights, pairs - offset, [c])

    def _bring_back(self, sums: ChunkSums, i: int, side: int) -> None:
        """Add a block's sum, over both codes of the pairs and at the block's length, to the chunk's."""
        place = i * self.sides + side
        chains = [self.chain[place * 2], self.chain[place * 2 + 1]]
        both = T.Shuffle(chains, [0, 2, 4, 6]) + T.Shuffle(chains, [1, 3, 5, 7])
        T.buffer_store(sums.dot, fma(f32x4(both), spread(self.length[i]), sums.dot[place]), [place])


def _bits(word: int):
    return spread(T.uint32(word))
