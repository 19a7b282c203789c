"""Helpers of the kernels that read a matrix: parameters, a thread's columns, words, codes."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from nearfar.format.scales import Table
from nearfar.kernels.jobs import Embed, Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.common import ceil_div, f32, high_half, low_half
from nearfar.targets.gpu.kernels.tables import value_of
from nearfar.targets.gpu.levels import LevelRows
from nearfar.targets.gpu.packing import PLANES, parts

SPLIT_UNIT = 16  # inputs of a unit of two planes: a group has at least as many


def params(job: Linear | Embed) -> list[str]:
    """The kernel's parameters: the job's inputs and `out`."""
    return [*job.inputs(len(parts(job.matrix))), "out"]


def lanes_for(outputs: int, each: int) -> int:
    """The number of threads along the output, of `each` columns: the most that waste less than a tenth of the
    last workgroup.
    """
    for lanes in (32, 16):
        if -(-outputs // (lanes * each)) * lanes * each <= outputs * 1.1:
            return lanes
    return 8


def neighbours(job: Linear, outputs: int, wanted: bool) -> int:
    """The number of neighbouring columns of a thread: 4 if `wanted` and possible, else 1."""
    return 4 if wanted and outputs % 4 == 0 and job.columns % 4 == 0 else 1


def column_of(bx, tx, output, lanes: int, outputs: int, beside: int):
    """The column of a thread's output: neighbouring threads have neighbouring columns, a thread has `beside`
    in a row.
    """
    return bx * (lanes * outputs) + output // beside * (lanes * beside) + tx * beside + output % beside


def loaded_column(bx, tx, output, lanes: int, outputs: int, beside: int, last: int | None):
    """The column of `column_of`, at most `last` (None: no column is beyond it); a group of neighbours moves
    as a whole.
    """
    column = column_of(bx, tx, output, lanes, outputs, beside)
    if last is None:
        return column
    return T.min(column - output % beside, last + 1 - beside) + output % beside


def word_shape(matrix: Matrix) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the array that holds codes or values."""
    part = parts(matrix)[0]
    return part.shape, part.dtype


def scale_shape(matrix: Matrix) -> tuple[int, ...]:
    """Shape of the words with scales (a dummy for dense matrices, which have no such parameter)."""
    return parts(matrix)[1].shape if matrix.quantized else (1, 1)


def scale_and_bias(matrix: Matrix, w1, group, column):
    """Scale and bias of a column's group, float32; the words that hold them are bound in the kernel that is
    being parsed.
    """
    scales = matrix.scales
    if scales.superblock:
        return _of_levels(matrix, w1, group, column)
    word = T.Bind(w1[group, column if scales.offsets else column // 2])
    low, high = low_half(word), high_half(word)
    if scales.offsets:
        return low, high
    scale = T.Select(column % 2 == 0, low, high)
    return scale, scale * T.float32(-matrix.zero)


def _of_levels(matrix: Matrix, w1, group, column):
    """Scale and bias of a column's group from integers and their factors (levels.py)."""
    levels, scales = LevelRows.of(matrix), matrix.scales
    found: list = [None] * scales.values
    for plane in levels.planes:
        word = T.Bind(w1[plane.first + group // plane.groups, column])
        for i in range(scales.values):
            shift = group % plane.groups * plane.field + i * plane.bits
            part = T.shift_right(word, T.Cast("uint32", shift)) & T.uint32((1 << plane.bits) - 1)
            part = T.shift_left(part, T.uint32(plane.low)) if plane.low else part
            found[i] = part if found[i] is None else found[i] | part
    integers = [f32(T.Cast("int32", each)) for each in found]
    superblock = group // levels.groups
    word = T.Bind(w1[levels.factors + superblock // levels.shared, column])
    low, high = low_half(word), high_half(word)
    if scales.offsets:
        return low * integers[0], high * -integers[1]
    factor = T.Select(superblock % 2 == 0, low, high)
    scale = factor * (integers[0] - T.float32(scales.centre))
    return scale, scale * T.float32(-matrix.zero)


@dataclass(frozen=True)
class Units:
    """A column as `count` units of `inputs` inputs in `words` words each; usually a unit is one word.

    `placed`: codes have one plane and are used at their place in the word (placed_code). `planes`: the bits
    of two planes otherwise (packing.py); with one plane there are none. `table`: the table of the codes.
    """

    inputs: int
    words: int
    count: int
    placed: bool
    planes: tuple[int, ...] = ()
    table: Table | None = None

    @staticmethod
    def of(matrix: Matrix) -> Units:
        """The units in which a matrix is stored."""
        planes = PLANES[matrix.bits] if matrix.quantized else (matrix.bits,)
        if len(planes) == 1:
            inputs = 32 // matrix.bits
            placed, table = matrix.quantized and not matrix.scales.table, matrix.scales.table
            return Units(inputs, 1, ceil_div(matrix.k, inputs), placed, table=table)
        words = sum(ceil_div(SPLIT_UNIT * bits, 32) for bits in planes)
        return Units(SPLIT_UNIT, words, matrix.k // SPLIT_UNIT, placed=False, planes=planes)

    def load(self, w0, unit, word, column):
        """Load word `word` of a unit of a column. Two units share a word of one-bit codes: it is shifted
        down.
        """
        if not self.planes:
            return w0[unit + word, column]
        low, high = self.planes
        lower, before = SPLIT_UNIT * low // 32, self.count * SPLIT_UNIT * low // 32
        if high == 1:
            shared = w0[before + unit // 2, column]
            upper = T.shift_right(shared, T.Cast("uint32", unit % 2 * SPLIT_UNIT))
        else:
            upper = w0[before + unit, column]
        return T.if_then_else(word < lower, w0[unit * lower + word, column], upper, dtype=w0.dtype)

    def code(self, word, first, e):
        """Code `e` of a unit whose words begin at word[first], as float32; of a code with a table its
        value.
        """
        if not self.planes:
            code = whole_code(word[first], 32 // self.inputs, e)
            return code if self.table is None else value_of(self.table, code)
        low, high = self.planes
        each = 32 // low
        lower = T.shift_right(word[first + e // each], T.Cast("uint32", e % each * low)) & T.uint32(
            (1 << low) - 1
        )
        upper = T.shift_right(word[first + self.words - 1], T.Cast("uint32", e * high)) & T.uint32(
            (1 << high) - 1
        )
        return f32(T.Cast("int32", lower | T.shift_left(upper, T.uint32(low))))


def dense_element(word, bits: int, e):
    """Element `e` (may be symbolic) of a dense matrix's word, as float32: the word, or one half of it."""
    return word if bits == 32 else T.Select(e % 2 == 0, low_half(word), high_half(word))


def placed_code(word, bits: int, e):
    """Code `e` (may be symbolic) of a word, masked but not shifted down, as float32: code * 2^(bits*e).

    The top code is packed with its sign bit inverted (see packing), so it gives (code -
    2^(bits-1)) * 2^(bits*e). SwiftShader shifts vectors one lane after the other, some twenty instructions;
    masking and converting from int32 take one each.
    """
    mask = T.shift_left(T.uint32((1 << bits) - 1), T.Cast("uint32", e * bits))
    return f32(T.Cast("int32", word & mask))


def whole_code(word, bits: int, e):
    """Code `e` of a word, as float32: placed_code shifted down, with what it lacks."""
    e = T.int32(e) if isinstance(e, int) else e
    lacks = T.Select(e == 32 // bits - 1, T.float32(top_code_offset(bits)), T.float32(0))
    return placed_code(word, bits, e) * place_factor(bits, e) + lacks


def place_factor(bits: int, e):
    """2^-(bits*e), the factor of an input before it is multiplied by placed_code(…, e). `e` may be
    symbolic.
    """
    return T.reinterpret("float32", (127 - bits * e) * (1 << 23))


def top_code_offset(bits: int) -> float:
    """The amount by which the top code of a word is too small: 2^(bits-1)."""
    return float(1 << (bits - 1))
