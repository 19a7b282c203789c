"""Four neighbouring columns as one vector: how GPU kernels read matrices and rows.

A lane that owns four columns reads a row of words as one `uint32x4`, 16 bytes in a load, and computes on
vectors of four float32. Buffers have vector types, from which both code generators make one load. Functions
here take only known places in a word: kernels call them once for each place.
"""

# mypy: ignore-errors
# TVMScript: what is built here are expressions, and statements of the kernel that is being parsed.
from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from nearfar.kernels.jobs import Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.common import MANTISSA, constant, fma, lifted_bits
from nearfar.targets.gpu.kernels.linear.layout import Units, scale_shape, word_shape
from nearfar.targets.gpu.kernels.tables import value_of
from nearfar.targets.gpu.packing import PLANES, SIGN_BIT

WIDTH = 4
HALF_WORD = 16
SCALE_WORDS = WIDTH // 2
"""Words with the scales of four columns, where they have no biases."""
LOW_HALVES, HIGH_HALVES, FOUR_HALVES = "low_halves", "high_halves", "four_halves"


def quarter(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array, counted in vectors of four."""
    return *shape[:-1], max(shape[-1] // WIDTH, 1)


def word_buffer(matrix: Matrix) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the array that holds codes or values, as vectors."""
    shape, dtype = word_shape(matrix)
    return quarter(shape), f"{dtype}x{WIDTH}"


def scale_buffer(matrix: Matrix) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the buffer with the words of scales of four columns, in vectors."""
    if not (matrix.scales.offsets or matrix.scales.superblock):
        groups, words = scale_shape(matrix)
        return (groups, words // SCALE_WORDS), f"uint32x{SCALE_WORDS}"
    return quarter(scale_shape(matrix)), f"uint32x{WIDTH}"


def of_numbers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel with parameters of numbers, and views of them as vectors under the same names.

    The calling program knows only numbers, and compares the types of its arguments.
    """
    held, views = [], []
    for param in func.params:
        width = int(param.dtype.lanes)
        if width > 1:
            shape = [*param.shape[:-1], param.shape[-1] * width]
            numbers = tirx.decl_buffer(shape, str(param.dtype).split("x")[0], name=str(param.name))
            views.append(tirx.DeclBuffer(param, data=numbers.data))
            param = numbers
        held.append(param)
    if not views:
        return func
    return tirx.PrimFunc(held, tirx.SeqStmt([*views, func.body]), func.ret_type, func.attrs)


def fits(job: Linear) -> bool:
    """Whether the job's rows and columns are whole vectors."""
    return job.columns % WIDTH == job.width % WIDTH == job.matrix.k % WIDTH == 0


def spread(value):
    """A vector with one number in all four places."""
    return T.Broadcast(value, WIDTH)


def at(vector, place: int):
    """One number of a vector."""
    return T.Shuffle([vector], [place])


def joined(values: list):
    """A vector of numbers, usually four."""
    return T.Shuffle(values, list(range(len(values))))


def total(vector):
    """The sum of a vector's four numbers."""
    return (at(vector, 0) + at(vector, 1)) + (at(vector, 2) + at(vector, 3))


def or_zero(condition, vector):
    """The vector if the condition holds, else zeros. WGSL's code generator has no vectors of booleans."""
    none, places = tirx.const(0, str(vector.ty.dtype).split("x")[0]), range(int(vector.ty.dtype.lanes))
    return joined([T.Select(condition, at(vector, place), none) for place in places])


def zero():
    """A vector of four zeros."""
    return spread(T.float32(0))


def number(value: float):
    """A vector with a known number in all four places."""
    return spread(constant(value))


def clear(array, count: int) -> None:
    """Set the first vectors of a local array to zero (a statement of the kernel that is being parsed)."""
    for i in range(count):
        T.buffer_store(array, zero(), [i])


def f32x4(vector):
    """Cast to float32."""
    return T.Cast(f"float32x{WIDTH}", vector)


def low_halves(words):
    """The float16 in the low half of each word, as float32."""
    return T.call_pure_extern(f"float32x{WIDTH}", LOW_HALVES, words)


def high_halves(words):
    """The float16 in the high half of each word, as float32."""
    return T.call_pure_extern(f"float32x{WIDTH}", HIGH_HALVES, words)


def four_halves(words):
    """The float16 in the halves of two words, in order, as float32."""
    return T.call_pure_extern(f"float32x{WIDTH}", FOUR_HALVES, words)


@dataclass(frozen=True)
class ColumnReader:
    """A column of a matrix as `count` units of `inputs` inputs (a multiple of 4) in `words` words each."""

    matrix: Matrix
    units: Units
    inputs: int
    words: int
    count: int

    @staticmethod
    def of(matrix: Matrix) -> ColumnReader:
        """The reader of a matrix. A unit of a dense matrix has as many inputs as one vector of x."""
        units = Units.of(matrix)
        fold = max(WIDTH // units.inputs, 1)
        return ColumnReader(matrix, units, units.inputs * fold, units.words * fold, units.count // fold)

    def load(self, w0, unit, word: int, column):
        """Load word `word` of a unit of four columns."""
        if self.matrix.quantized:
            return self.units.load(w0, unit, word, column)
        return w0[unit * self.words + word, column]

    @property
    def placed(self) -> bool:
        """Whether codes are used at their place in halves of their word: see `lift`."""
        return self.matrix.quantized and not self.units.planes

    def lift(self, word: list, half: int):
        """The codes in a half of a unit's word, as the last bits of the mantissa of a float32 of 2^23.

        The sign bit is as the codes have it (see packing.SIGN_BIT).
        """
        if half:
            top = 1 << (HALF_WORD - 1)
            return T.shift_right(word[0], _bits(HALF_WORD)) ^ _bits(lifted_bits(0) | top)
        return (word[0] & _bits((1 << HALF_WORD) - 1)) | _bits(lifted_bits(0))

    def weight(self, word: list, e: int, lifted: list):
        """Weight or code `e` of a unit with the words `word`, float32x4. `lifted`: halves of placed codes.
        Codes without biases are centred: the code that stands for 0 is subtracted.

        No integer is converted: masking, subtracting and multiplying run at full rate on every GPU, a
        conversion at a quarter or an eighth of it on some. A masked code adds its value times 2^place to
        2^23, so one multiply-add, without rounding, gives the value.
        """
        bits, zero = self.matrix.bits, self.matrix.zero
        if bits == 32:
            return word[e]
        if not self.matrix.quantized:
            return high_halves(word[e // 2]) if e % 2 else low_halves(word[e // 2])
        if not self.placed:
            return number_of(self._split_code(word, e), zero)
        half, place = divmod(e * bits, HALF_WORD)
        mask = ((1 << bits) - 1) << place | ~((1 << MANTISSA) - 1) & 0xFFFFFFFF
        made = T.reinterpret(f"float32x{WIDTH}", lifted[half] & _bits(mask))
        if not place:
            return made - number((1 << MANTISSA) + zero)
        return fma(made, number(0.5**place), number(-(1 << MANTISSA - place) - zero))

    def whole(self, word: list, e: int):
        """Code `e` of a unit with one plane, uint32x4."""
        bits, last = self.matrix.bits, self.inputs - 1
        shifted = T.shift_right(word[0], _bits(e * bits)) if e else word[0]
        if e == last:  # its highest bit is stored inverted, see packing.SIGN_BIT
            return shifted ^ _bits(1 << bits - 1)
        return shifted & _bits((1 << bits) - 1)

    def _split_code(self, word: list, e: int):
        """Code `e` of a unit with two planes."""
        low, high = self.units.planes
        each = 32 // low
        lower = T.shift_right(word[e // each], _bits(e % each * low)) & _bits((1 << low) - 1)
        upper = T.shift_right(word[-1], _bits(e * high)) & _bits((1 << high) - 1)
        return lower | T.shift_left(upper, _bits(low))


@dataclass(frozen=True)
class Slices:
    """How a thread reads `made` inputs (2, 4 or 8, from a multiple of that on) of four columns.

    `planes`: for each plane, the bits of a number, the row where it begins, and the words that a thread
    reads.
    """

    matrix: Matrix
    planes: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(matrix: Matrix, made: int) -> Slices:
        """The slices of a matrix: one for each plane of bits."""
        out, before = [], 0
        for bits in PLANES[matrix.bits] if matrix.quantized else (matrix.bits,):
            out.append((bits, before, max(made * bits // 32, 1)))
            before += matrix.k * bits // 32
        return Slices(matrix, tuple(out))

    @property
    def words(self) -> int:
        """The number of words of four columns that a thread reads."""
        return sum(count for _, _, count in self.planes)

    def load(self, w0, start, word: int, column, ragged: bool = False):
        """Load word `word` for the inputs from `start` on (symbolic).

        `ragged`: past the matrix's last row the last row is loaded, since a thread's inputs of a dense matrix
        may end early.
        """
        for bits, before, count in self.planes:
            if word < count:
                row = before + start // (32 // bits) + word
                return w0[T.min(row, w0.shape[0] - 1) if ragged else row, column]
            word -= count
        raise IndexError(word)

    def bring(self, word, w0, start, column, ragged: bool = False) -> None:
        """Load a thread's words for its inputs from `start` on into registers (statements)."""
        for i in range(self.words):
            T.buffer_store(word, self.load(w0, start, i, column, ragged), [i])

    def weight(self, word, first, e: int):
        """Weight or code of input first + e, float32x4; `first` (symbolic) counts from a multiple of 32.
        Codes without biases are centred, as those of a ColumnReader; those with a table become its values.
        """
        if self.matrix.bits == 32:
            return word[e]
        if not self.matrix.quantized:
            return high_halves(word[e // 2]) if e % 2 else low_halves(word[e // 2])
        code, at_word, below = None, 0, 0
        for bits, _, count in self.planes:
            each = 32 // bits
            held = word[at_word + e // each]
            if len(self.planes) == 1:
                held = held ^ _bits(int(SIGN_BIT))
            shift = T.Cast("uint32", (first + e) % each * bits)
            part = T.shift_right(held, spread(shift)) & _bits((1 << bits) - 1)
            code = part if code is None else code | T.shift_left(part, _bits(below))
            at_word, below = at_word + count, below + bits
        code = number_of(code, self.matrix.zero)
        return value_of(self.matrix.scales.table, code) if self.matrix.scales.table else code


def number_of(codes, zero: int = 0):
    """Codes minus `zero` as float32: codes become the last bits of a float32 of 2^23, which is then
    subtracted.
    """
    return T.reinterpret(f"float32x{WIDTH}", codes | _bits(lifted_bits(0))) - number((1 << MANTISSA) + zero)


def _bits(word: int):
    return spread(T.uint32(word))
