"""Quantizes rows of keys and values when they are appended to a quantized cache (layout: cached.py).

Each lane has two vectors of four components. It writes the least and the largest component of each to
workgroup memory; after a barrier it computes the scale and offset of their groups by itself, and the codes.
Every word is written by one lane: with 8 bits by the lane with its vector, with 4 bits, after another
barrier, by the lane with the first of its two vectors; scale and offset by the lane with the group's first
vector. With 4 bits, the weighted rounding errors of keys move the offset before it is written
(nearfar.format.kv.rounding).

Scale and offset are rounded to float16 by bits, to nearest, because devices may round `pack2x16float`
differently. Codes are computed from the scale and offset as they are stored (docs/decisions/0024).
"""

# mypy: ignore-errors
# TVMScript: what is written here are statements of the kernel that is being parsed.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from nearfar.targets.gpu.kernels.attention.cached import BYTE, PageWords, half_of
from nearfar.targets.gpu.kernels.common import (
    HIGHEST,
    INFINITE_F32,
    LOWEST,
    MOST_F16,
    SIZE_F32,
    exactly,
    saturated,
)
from nearfar.targets.gpu.kernels.script.text import local_array, shared_array
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, at, joined

SIDES = 2
"""Vectors of a head that a lane has."""
NONE = 2 * MOST_F16
"""The largest component of a vector with NaN, since min and max of a GPU may lose NaN."""
_NAN_F16 = 0x7E00


@dataclass(frozen=True)
class QuantizerMemory:
    """The quantizer's working memory.

    The workgroup keeps, for each vector of a head, its least and largest component and, with 4 bits, the
    codes and the rounding errors. A lane keeps the group's offset, largest component and inverse scale, then
    a sum; scale and offset as bits; and for its vectors the words with scale and offset, then the words with
    codes.
    """

    low: Any
    high: Any
    told: Any
    left: Any
    ends: Any
    pair: Any
    words: Any


@dataclass(frozen=True)
class Quantizer:
    """Writes a kernel's statements for heads of `rows` rows of a workgroup.

    The workgroup's lanes have all vectors of the heads, each lane two vectors of `own` rows: vectors[i] is of
    side i % SIDES of the lane's row i / SIDES.
    """

    layout: PageWords
    rows: int
    own: int = 1

    @property
    def count(self) -> int:
        """The number of vectors in a head."""
        return self.layout.head_dim // WIDTH

    @property
    def joins(self) -> bool:
        """Whether two vectors share a word of codes, so that a barrier is needed before `write`."""
        return self.layout.bits < BYTE

    @property
    def shared_bytes(self) -> int:
        """Bytes of workgroup memory that the quantizer needs."""
        return 4 * self.rows * self.count * (2 + 2 * self.joins)

    def memory(self) -> QuantizerMemory:
        """Declare the memory of a lane and its workgroup."""
        held = self.rows * self.count
        return QuantizerMemory(
            shared_array("low", held, "float32"),
            shared_array("high", held, "float32"),
            shared_array("told", held, "uint32") if self.joins else None,
            shared_array("left", held, "float32") if self.joins else None,
            local_array("ends", 4, "float32"),
            local_array("pair_bits", 2, "uint32"),
            local_array("words", 2 * SIDES * self.own, "uint32"),
        )

    def measure(self, held: QuantizerMemory, row, d, vectors, i) -> None:
        """Saturate vector `d` of a row, vectors[i], and write its least and largest component to workgroup
        memory; a barrier must follow.
        """
        sizes = [T.reinterpret("uint32", at(vectors[i], e)) & T.uint32(SIZE_F32) for e in range(WIDTH)]
        none = _folded(T.max, sizes) > T.uint32(INFINITE_F32)
        T.buffer_store(held.ends, T.Select(none, T.float32(NONE), T.float32(LOWEST)), [0])
        T.buffer_store(vectors, joined([saturated(at(vectors[i], e)) for e in range(WIDTH)]), [i])
        numbers = [at(vectors[i], e) for e in range(WIDTH)]
        T.buffer_store(held.low, _folded(T.min, numbers), [row * self.count + d])
        # A select, not a maximum: devices differ in the maximum of a number and NaN.
        most = T.Select(held.ends[0] > T.float32(0), T.float32(NONE), _folded(T.max, numbers))
        T.buffer_store(held.high, most, [row * self.count + d])

    def encode(self, held: QuantizerMemory, row, d, vectors, i, weights) -> None:
        """Compute the words of vector `d` of a row, vectors[i], for `write`.

        With 4 bits, share its codes with the other lanes, and the sum of its rounding errors times `weights`,
        a vector.
        """
        layout, ends, pair = self.layout, held.ends, held.pair
        T.buffer_store(ends, T.float32(HIGHEST), [0])
        T.buffer_store(ends, T.float32(LOWEST), [1])
        with T.serial(layout.vectors) as e:
            place = row * self.count + d // layout.vectors * layout.vectors + e
            T.buffer_store(ends, T.min(ends[0], held.low[place]), [0])
            T.buffer_store(ends, T.max(ends[1], held.high[place]), [1])
        none, levels = ends[1] > T.float32(MOST_F16), 2**layout.bits - 1
        T.buffer_store(pair, T.Select(none, T.uint32(_NAN_F16), narrowed(ends[0])), [1])
        T.buffer_store(ends, half_of(pair[1], high=False), [0])
        T.buffer_store(ends, T.max((ends[1] - ends[0]) * exactly(1 / levels), T.float32(0)), [2])
        T.buffer_store(pair, T.Select(none, T.uint32(0), narrowed(ends[2])), [0])
        T.buffer_store(held.words, pair[0] | T.shift_left(pair[1], T.uint32(16)), [i])
        T.buffer_store(ends, half_of(pair[0], high=False), [2])
        T.buffer_store(ends, ends[2], [1])
        inverse = T.Select(ends[2] > T.float32(0), T.float32(1) / ends[2], T.float32(0))
        T.buffer_store(ends, inverse, [2])
        codes, own = SIDES * self.own + i, row * self.count + d
        T.buffer_store(held.words, T.uint32(0), [codes])
        T.buffer_store(ends, T.float32(0), [3])
        for e in range(WIDTH):
            steps = (at(vectors[i], e) - ends[0]) * ends[2] + T.float32(0.5)
            code = T.Bind(_code(steps, levels))
            shifted = T.shift_left(code, T.uint32(BYTE * e))
            T.buffer_store(held.words, held.words[codes] | shifted, [codes])
            if self.joins:
                left = at(vectors[i], e) - (T.Cast("float32", code) * ends[1] + ends[0])
                T.buffer_store(ends, ends[3] + left * at(weights, e), [3])
        if self.joins:
            T.buffer_store(held.told, held.words[codes], [own])
            T.buffer_store(held.left, ends[3], [own])

    def write(self, held: QuantizerMemory, row, d, i, cache, page, head, offset) -> None:
        """Write scale and offset of the group of vector `d`, vectors[i], and its codes to a position of the
        cache.

        With 8 bits the codes are those of the vector; with 4, after a barrier, the lane with the first of two
        vectors writes both.
        """
        layout = self.layout
        with T.If(d % layout.vectors == 0), T.Then():
            place = layout.index(layout.pair_place(offset, d))
            if self.joins:
                self._move(held, row, d, i)
            T.buffer_store(cache, held.words[i], [page, head, *place])
        if not self.joins:
            place = layout.index(layout.code_place(offset, d))
            T.buffer_store(cache, held.words[SIDES * self.own + i], [page, head, *place])
            return
        with T.If(layout.is_low(d)), T.Then():
            place = row * self.count + d
            word = held.told[place] | T.shift_left(held.told[place + layout.apart], T.uint32(4))
            T.buffer_store(cache, word, [page, head, *layout.index(layout.code_place(offset, d))])

    def _move(self, held: QuantizerMemory, row, d, i) -> None:
        """Move the offset of the group that begins with vector `d` by its rounding errors; NaN stays NaN."""
        bits, ends = T.Bind(held.words[i]), held.ends
        T.buffer_store(ends, half_of(bits, high=True), [0])
        with T.serial(self.layout.vectors) as e:
            T.buffer_store(ends, ends[0] + held.left[row * self.count + d + e], [0])
        offset = T.shift_right(bits, T.uint32(16))
        moved = T.Select(offset == T.uint32(_NAN_F16), offset, narrowed(saturated(ends[0])))
        word = bits & T.uint32(0xFFFF) | T.shift_left(moved, T.uint32(16))
        T.buffer_store(held.words, word, [i])


def narrowed(value):
    """The bits, as uint32, of the float16 nearest to a number within float16's range."""
    whole = T.reinterpret("int32", value)
    size = whole & T.int32(SIZE_F32)
    last = T.shift_right(size, T.int32(13)) & T.int32(1)
    normal = T.shift_right(size - T.int32(112 << 23) + T.int32(0xFFF) + last, T.int32(13))
    # For subnormal results 0.5 is added: the last bit of the sum is worth a subnormal float16's last bit.
    half = T.reinterpret("float32", size) + T.float32(0.5)
    small = T.reinterpret("int32", half) - T.int32(0x3F000000)
    number = T.Select(size < T.int32(113 << 23), small, normal)
    return T.Cast("uint32", number | (T.shift_right(whole, T.int32(16)) & T.int32(0x8000)))


def _code(steps, levels: int):
    """The code for a number of steps plus a half; any code for NaN, whose group is NaN anyway."""
    return T.Cast("uint32", T.min(T.max(steps, T.float32(0)), T.float32(levels)))


def _folded(of, values: list):
    """Combine all values by a function of two."""
    made = values[0]
    for value in values[1:]:
        made = of(made, value)
    return made
