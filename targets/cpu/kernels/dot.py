"""Integer products of codes and inputs, by the instruction that a vector unit has for them.

Inputs are integers of at most LARGEST, in groups of four: a quad (packing.py), which is two words. On units
that sum pairs of int16 the words are inputs (0, 2) and (1, 3). On units that sum bytes, an input is 256·high
+ low, both int8, and the words are the four high and the four low bytes. Σ q·high and Σ q·low are exact in 32
bits, so all units compute the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.tables import ZERO, looked_up
from nearfar.targets.cpu.units import Dot, Unit

Expr = Any
Words = list[list[Expr]]  # the words of a loop turn, for each plane
LARGEST = 127 * 256 + 127
MANY = 8
"""Rows of a tile with which products take longer than reading the weights."""
SUMS: dict[Dot, int] = {
    "pmaddwd": 1, "dot_i16x8": 1, "smlal": 2, "vpdpbusd": 2, "sdot": 2, "usmmla": 2,
}  # fmt: skip
"""Registers of sums needed for a register of words."""


def turn(matrix: Matrix) -> int:
    """The number of inputs that kernels take at a time: whole words of every plane, at least two quads, at
    most a group.
    """
    quads = max(2, *(plane.quads for plane in packing.PLANES[matrix.bits]))
    return min(matrix.group, packing.QUAD * quads)


def lines(layout: packing.BlockLayout, cell: Expr, inside: int, c: Expr) -> list[tuple[Expr, int]]:
    """The lines of a span that hold turn c of group `inside` of a cell: the first, and their number, of each
    plane.
    """
    matrix, found = layout.matrix, []
    for plane, start in zip(layout.planes, layout.starts, strict=False):
        of_word = packing.QUAD * plane.quads
        count = max(1, turn(matrix) // of_word)
        begin = layout.codes + start + inside * matrix.group // of_word
        found.append((begin + cell * layout.starts[-1] + c * count, count))
    return found


def tile(unit: Unit, m: int, sums: int, widths: tuple[int, ...] = (16, 8)) -> tuple[int, int]:
    """The numbers of rows, out of m, and of a block's columns that are summed in one pass; sums take at most
    half the registers.

    Among tiles of equal size the one with more rows is chosen, because it unpacks a weight less often. (On
    AVX2 LLVM's scheduler spills five of the sums of 4 by 16.)
    """
    fitting = [
        (rows, columns)
        for rows in (8, 4, 2, 1)
        for columns in widths
        if m % rows == 0
        and columns >= unit.lanes
        and rows * columns * sums <= unit.registers // 2 * unit.lanes
    ]
    return max(fitting, key=lambda each: (each[0] * each[1], each[0]))


class DotSums:
    """The sums for some rows and columns, in registers.

    `scaled`: the second quad of a word of 4-bit codes is not shifted down, so its codes are 16 times too
    large; it has sums of its own, which are shifted back exactly. This needs a mask instead of a shift and a
    mask, where these are most of the work. `offset`: a constant subtracted from codes to make them int8, on
    units without products of uint8. `signed`: the unit's products take a table's values as they are; others
    take them plus tables.ZERO, as uint8.
    """

    def __init__(self, unit: Unit, matrix: Matrix, rows: int, columns: int) -> None:
        self.unit, self.matrix, self.rows, self.pieces = unit, matrix, rows, columns // unit.lanes
        self.table, self.signed = matrix.scales.table, unit.dot == "sdot"
        self.scaled = matrix.bits == 4 and not self.table and self._scales(unit.dot)
        self.offset = 128 if unit.dot == "sdot" and matrix.bits == 8 else 0
        self.correction = self.offset - matrix.zero - (ZERO if self.table and not self.signed else 0)
        self._vector = f"int32x{unit.lanes}"
        self._lanewise = unit.dot not in ("smlal", "usmmla")
        self._each = SUMS[unit.dot] * (2 if self.scaled else 1)

    @property
    def streams(self) -> bool:
        """Whether a kernel reads each line once, from memory: few rows, and all columns at once."""
        return self.rows < MANY and self.pieces * self.unit.lanes == v.ROWS

    def _scales(self, dot: Dot) -> bool:
        """Whether masking without shifting pays off.

        It does at one row, and with pmaddwd as long as half the registers hold both sums: there shifts wait
        for the same port as products (two rows: 18 cycles instead of 22 on Haswell, llvm-mca).
        """
        if dot == "pmaddwd":
            return 2 * self.rows * self.pieces <= self.unit.registers // 2
        return self.rows == 1 and dot not in ("sdot", "usmmla")

    def inputs(self, values: Expr) -> Expr:
        """The eight words for 16 inputs (int32), in the order in which they are stored for one row."""
        raise NotImplementedError

    @property
    def words(self) -> int:
        """The words of the codes of a quad."""
        return 1

    def place(self, i: int, row: Expr) -> Expr:
        """The index at which word i of a row is stored: the words i of all rows are neighbours."""
        return i * self.rows + row

    def codes(self, words: Words, first: int = 0) -> list[list[Expr]]:
        """The words of codes of each quad of a turn, unpacked from registers of words; `first`: the quad of
        its cell (packing.BlockLayout) with which the turn's group begins.
        """
        raise NotImplementedError

    @property
    def begins(self) -> bool:
        """Whether sums can begin with the correction, which saves adding it at the end."""
        return bool(self.correction) and self._lanewise

    def zero(self, starts: Sequence[Expr] | None = None) -> Expr:
        """Registers for sums, all set to 0; or those of each row to a number, int32, added to its totals."""
        sums = v.registers(self.rows * self.pieces * self._each, self._vector)
        for i in range(self.rows * self.pieces * self._each):
            v.put1(sums, [i], self._splat(0))
        for row, start in enumerate(starts or ()):
            for piece in range(self.pieces):
                at = self._at(row, piece) + SUMS[self.unit.dot] - 1
                v.put1(sums, [at], T.Bind(v.splat(start, self.unit.lanes)))
        return sums

    def add(self, sums: Expr, codes: Sequence[Sequence[Sequence[Expr]]], inputs: InputReader) -> None:
        """Add the products of a turn: codes[piece][quad][word] with the inputs of the same quads."""
        for quad in range(len(codes[0])):
            for which in range(2):
                for row in range(self.rows):
                    x = inputs.word(self.place(quad * 2 + which, row))
                    for piece, of in enumerate(codes):
                        at = self._at(row, piece) + (self._each // 2 if self.scaled and quad % 2 else 0)
                        self._multiply(sums, at, of[quad], which, x)

    def total(self, sums: Expr, row: int, piece: int) -> Expr:
        """The sum for a row and a register of columns."""
        at = self._at(row, piece)
        total = self._whole(sums, at)
        if not self.scaled:
            return total
        return T.Bind(total + (self._whole(sums, at + self._each // 2) >> self._splat(4)))

    def _multiply(self, sums: Expr, at: int, codes: Sequence[Expr], which: int, x: Expr) -> None:
        """Add products to sums[at …]; `which`: whether x is the first or second word of a quad."""
        raise NotImplementedError

    def _whole(self, sums: Expr, at: int) -> Expr:
        """The total of the registers at sums[at …]."""
        raise NotImplementedError

    def _at(self, row: int, piece: int) -> int:
        return (row * self.pieces + piece) * self._each

    def _splat(self, value: int) -> Expr:
        return v.isplat(value - (value >> 31 << 32), n=self.unit.lanes)

    def _looked_up(self, codes: Expr) -> Expr:
        """The values of the codes of a quad, where the matrix has a table; otherwise the codes."""
        if self.table is None:
            return codes
        return looked_up(self.unit, self.table, codes, signed=self.signed)

    def _quads(self) -> range:
        return range(turn(self.matrix) // packing.QUAD)

    def _bits(self, words: Words, quad: int, first: int, ones: int, down: int = 0) -> Expr:
        """The codes of a quad in those bytes of a word that have a one in `ones`, shifted down by `down`
        bits; `first`: see `codes`.
        """
        found = None
        for plane, of in zip(packing.PLANES[self.matrix.bits], words, strict=True):
            word, at = divmod(first % plane.quads + quad, plane.quads)
            shift, mask = at * plane.bits - plane.low + down, plane.mask << plane.low
            if self.scaled:
                shift, mask = down, plane.mask << at * plane.bits
            moved = of[word] >> self._splat(shift) if shift > 0 else of[word] << self._splat(-shift)
            part = T.Bind((moved if shift else of[word]) & self._splat(mask * ones))
            found = part if found is None else T.Bind(found | part)
        return found


class Bytes(DotSums):
    """Products by vpdpbusd or sdot, with separate sums for high bytes and low bytes."""

    ORDER: tuple[int, ...] = (0, 4, 1, 5, 2, 6, 3, 7)  # the high and the low word of each quad

    def inputs(self, values: Expr) -> Expr:
        """The high and low words of 16 inputs; see DotSums.inputs."""
        high = T.Bind((values + v.isplat(128)) >> v.isplat(8))
        low = T.Bind(values - (high << v.isplat(8)))
        both = [T.Bind(v.bits(v.cast(half, "int8x16"), "int32x4")) for half in (high, low)]
        return T.Bind(tirx.Shuffle(both, self.ORDER))

    def codes(self, words: Words, first: int = 0) -> list[list[Expr]]:
        """One word of codes for each quad; see DotSums.codes."""
        found = [self._looked_up(self._word(words, quad, first)) for quad in self._quads()]
        return [[T.Bind(code ^ self._splat(0x80808080)) if self.offset else code] for code in found]

    def _word(self, words: Words, quad: int, first: int) -> Expr:
        """The codes of a quad; NEON shifts bytes, so codes in a byte's highest bits need no mask."""
        plane = packing.PLANES[self.matrix.bits][0]
        word, at = divmod(quad, plane.quads)
        if self.unit.architecture != "aarch64" or len(words) > 1 or at != plane.quads - 1 or at == 0:
            return self._bits(words, quad, first, 0x01010101)
        down = v.isplat(at * plane.bits, "uint8", 4 * self.unit.lanes)
        return T.Bind(v.bits(v.bits(words[0][word], f"uint8x{4 * self.unit.lanes}") >> down, self._vector))

    def _multiply(self, sums: Expr, at: int, codes: Sequence[Expr], which: int, x: Expr) -> None:
        lanes = self.unit.lanes
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        if self.unit.dot == "vpdpbusd":
            name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        product = v.intrin(
            self._vector, name, sums[at + which], *(v.bits(a, f"int8x{4 * lanes}") for a in (codes[0], x))
        )
        v.put1(sums, [at + which], product)

    def _whole(self, sums: Expr, at: int) -> Expr:
        return T.Bind((sums[at] << self._splat(8)) + sums[at + 1])


class Squares(Bytes):
    """Products by usmmla: eight codes of two columns times the high and the low bytes of eight inputs."""

    ORDER = (0, 1, 4, 5, 2, 3, 6, 7)

    def place(self, i: int, row: Expr) -> Expr:
        """The index of word i: the four words of eight inputs are neighbours; see DotSums.place."""
        return (i // 4 * self.rows + row) * 4 + i % 4

    def add(self, sums: Expr, codes: Sequence[Sequence[Sequence[Expr]]], inputs: InputReader) -> None:
        """Add the products of a turn; see DotSums.add."""
        for quad in range(0, len(codes[0]), 2):
            for row in range(self.rows):
                x = inputs.vector(self.place(quad * 2, row))
                for piece, of in enumerate(codes):
                    for half, lanes in enumerate(((0, 4, 1, 5), (2, 6, 3, 7))):
                        two = T.Bind(tirx.Shuffle([of[quad][0], of[quad + 1][0]], lanes))
                        self._square(sums, self._at(row, piece) + half, two, x)

    def _square(self, sums: Expr, at: int, codes: Expr, x: Expr) -> None:
        name = "llvm.aarch64.neon.usmmla.v4i32.v16i8"
        v.put1(
            sums, [at], v.intrin(self._vector, name, sums[at], v.bits(codes, "int8x16"), v.bits(x, "int8x16"))
        )

    def _whole(self, sums: Expr, at: int) -> Expr:
        both = [sums[at], sums[at + 1]]
        high, low = (T.Bind(tirx.Shuffle(both, lanes)) for lanes in ((0, 2, 4, 6), (1, 3, 5, 7)))
        return T.Bind((high << self._splat(8)) + low)


class PairProducts(DotSums):
    """Products of pairs of int16 by pmaddwd, dot_i16x8 or smlal; smlal leaves the two products of a pair
    separate.
    """

    def inputs(self, values: Expr) -> Expr:
        """The words (0, 2) and (1, 3) of each quad; see DotSums.inputs."""
        order = [quad + i for quad in range(0, 16, 4) for i in (0, 2, 1, 3)]
        return T.Bind(v.bits(tirx.Shuffle([T.Bind(v.cast(values, "int16x16"))], order), "int32x8"))

    @property
    def words(self) -> int:
        """See DotSums.words."""
        return 2

    def codes(self, words: Words, first: int = 0) -> list[list[Expr]]:
        """Two words of codes for each quad; see DotSums.codes.

        Codes of one plane are masked as pairs. Others are put together as bytes, which are then made pairs:
        that takes 7 operations instead of 10 for codes of two planes.
        """
        if self.matrix.bits in (2, 4) and self.table is None:
            at = [(quad, down) for quad in self._quads() for down in (0, 8)]
            found = [self._bits(words, quad, first, 0x00010001, down) for quad, down in at]
            return [found[i : i + 2] for i in range(0, len(found), 2)]
        return [self._pairs(self._looked_up(self._bytes(words, quad, first))) for quad in self._quads()]

    def _bytes(self, words: Words, quad: int, first: int) -> Expr:
        return words[0][quad] if self.matrix.bits == 8 else self._bits(words, quad, first, 0x01010101)

    def _pairs(self, values: Expr) -> list[Expr]:
        """The low and the high bytes of the halves of words, as pairs of int16."""
        lanes = 2 * self.unit.lanes
        halves = v.bits(values, f"uint16x{lanes}") >> v.isplat(8, "uint16", lanes)
        return [T.Bind(values & self._splat(0x00FF00FF)), T.Bind(v.bits(halves, self._vector))]

    def _multiply(self, sums: Expr, at: int, codes: Sequence[Expr], which: int, x: Expr) -> None:
        pairs, x = (v.bits(a, f"int16x{2 * self.unit.lanes}") for a in (codes[which], x))
        if self.unit.dot == "smlal":
            for half, of in enumerate((tirx.vectorlow, tirx.vectorhigh)):
                name, both = "llvm.aarch64.neon.smull.v4i32", (of("int16x4", a) for a in (pairs, x))
                v.put1(sums, [at + half], sums[at + half] + v.intrin("int32x4", name, *both))
            return
        name = {"pmaddwd": "llvm.x86.avx2.pmadd.wd", "dot_i16x8": "llvm.wasm.dot"}[self.unit.dot]
        v.put1(sums, [at], sums[at] + v.intrin(self._vector, name, pairs, x))

    def _whole(self, sums: Expr, at: int) -> Expr:
        if self.unit.dot != "smlal":
            return sums[at]
        both = [sums[at], sums[at + 1]]
        even, odd = (T.Bind(tirx.Shuffle(both, lanes)) for lanes in ((0, 2, 4, 6), (1, 3, 5, 7)))
        return T.Bind(even + odd)


def products(unit: Unit, matrix: Matrix, rows: int, columns: int) -> DotSums:
    """The products that suit a vector unit's dot instruction."""
    kinds: dict[Dot, type[DotSums]] = {"vpdpbusd": Bytes, "sdot": Bytes, "usmmla": Squares}
    return kinds.get(unit.dot, PairProducts)(unit, matrix, rows, columns)


class InputReader:
    """The words of a turn's inputs, from word `first` of a tile on, broadcast to all lanes.

    On aarch64, whose products multiply by one lane of a register, four are loaded at a time.
    """

    def __init__(self, unit: Unit, words: Expr, tile: Expr, first: Expr) -> None:
        self._unit, self._words, self._tile, self._first = unit, words, tile, first
        self._loaded: dict[int, Expr] = {}

    def word(self, i: int) -> Expr:
        """Word i in all lanes."""
        if self._unit.architecture != "aarch64":
            return T.Bind(v.splat(self._words[self._tile, self._first + i], self._unit.lanes))
        return T.Bind(tirx.Shuffle([self.vector(i - i % 4)], [i % 4] * 4))

    def vector(self, i: int) -> Expr:
        """Words i … i + 3 in a vector."""
        if i not in self._loaded:
            self._loaded[i] = v.keep(v.lanes(self._words, [self._tile, self._first + i], 4), "int32x4")
        return self._loaded[i]
