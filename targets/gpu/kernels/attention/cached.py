"""Loads keys and values from the cache in GPU kernels: floats, or codes that become floats.

The words of a page's head of a quantized cache (nearfar.format.kv) are codes [page_size, words of a row],
then pairs [page_size, groups], scale in the low half and offset in the high one: the layout of the cpu
target's values, for keys too. With 8 bits a byte holds a component; with 4 bits, byte j of each 16 holds
component j of 32 in its low half, and j + 16 in its high one. So four neighbouring components are four
neighbouring bytes of one word, or a half of each, and every word belongs to one group.
"""

# mypy: ignore-errors
# TVMScript: what is written here are statements of the kernel that is being parsed.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from nearfar.format.kv import BITS, UNIT, group_size, row_words
from nearfar.kernels.jobs import Paged
from nearfar.targets.gpu.kernels.attention.heads import HeadVectors
from nearfar.targets.gpu.kernels.common import exactly, f32, high_half, low_half
from nearfar.targets.gpu.kernels.script.text import local_array
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, joined, number_of, spread

BYTE = 8
NIBBLES = 0x0F0F0F0F
SUBNORMAL = 2.0**-24
"""The value of the last bit of a subnormal float16."""
_F16_EXPONENT, _F16_MANTISSA, _F16_SIGN = 0x7C00, 0x3FF, 0x8000


@dataclass(frozen=True)
class PageWords:
    """The places of a row's words in a page's head."""

    head_dim: int
    page_size: int
    bits: int
    group: int

    @staticmethod
    def of(job: Paged) -> PageWords | None:
        """The layout of a job's quantized cache; None if the cache holds floats."""
        if job.kv_dtype not in BITS:
            return None
        bits = BITS[job.kv_dtype]
        group = group_size(job.head_dim, bits)
        assert group is not None  # PlannedTarget.check has refused other shapes
        return PageWords(job.head_dim, job.page_size, bits, group)

    @property
    def row(self) -> int:
        """The number of words of a row's codes."""
        return self.head_dim * self.bits // 32

    @property
    def vectors(self) -> int:
        """The number of vectors of four components in a group."""
        return self.group // WIDTH

    @property
    def words(self) -> int:
        """The number of words of a row, with its pairs of scale and offset."""
        return row_words(self.head_dim, f"int{self.bits}")

    @property
    def apart(self) -> int:
        """The distance between the two vectors of a word of 4-bit codes, in vectors."""
        return UNIT // WIDTH // 2

    def is_low(self, d):
        """Whether vector `d` is in the low halves of its word's bytes."""
        return d // self.apart % 2 == 0

    def code_place(self, offset, d):
        """The word that holds vector `d` of the row at an offset."""
        if self.bits == BYTE:
            return offset * self.row + d
        return offset * self.row + d // (2 * self.apart) * self.apart + d % self.apart

    def pair_place(self, offset, d):
        """The word with scale and offset of the group of vector `d`."""
        return self.page_size * self.row + offset * (self.head_dim // self.group) + d // self.vectors

    def four(self, word, d):
        """The four components of vector `d`, a byte each, from the word that holds them."""
        if self.bits == BYTE:
            return word
        shift = T.Cast("uint32", d // self.apart % 2 * 4)
        return T.shift_right(word, shift) & T.uint32(NIBBLES)

    def index(self, place):
        """The last two indices of a cache for a word of a page's head."""
        return place // self.words, place % self.words


@dataclass(frozen=True)
class Cached:
    """The keys or values of a job's cache; `head`: the vectors into which the kernel divides a head."""

    job: Paged
    head: HeadVectors
    quantized: PageWords | None

    @staticmethod
    def of(job: Paged, head: HeadVectors) -> Cached:
        """The cache that a job reads."""
        return Cached(job, head, PageWords.of(job))

    @property
    def dtype(self) -> str:
        """The buffer's dtype: vectors of floats, or words."""
        return self.head.dtype(self.job.kv_dtype) if self.quantized is None else "uint32"

    def extents(self, pages):
        """The shape of a buffer of `pages` pages."""
        last = self.head.count if self.quantized is None else self.quantized.words
        return pages, self.job.kv_heads, self.job.page_size, last

    def memory(self):
        """Declare a lane's locals for loading a vector. They are locals because TVM copies a bound expression
        to every use.
        """
        if self.quantized is None:
            return None
        return LoadLocals(
            local_array("words", 2, "uint32"),
            local_array("unit", 2, "float32"),
            local_array("loaded", 1, f"float32x{WIDTH}"),
        )

    def load(self, held, cache, page, head, offset, d):
        """Vector `d` of a position in float32; writes statements if the cache is quantized."""
        layout = self.quantized
        if layout is None:
            return self.head.f32(cache[page, head, offset, d])
        self._bring(held, cache, page, head, offset, d)
        four = [T.shift_right(held.words[0], T.uint32(BYTE * e)) for e in range(WIDTH)]
        made = number_of(joined(four) & spread(T.uint32(0xFF))) * spread(held.unit[0]) + spread(held.unit[1])
        T.buffer_store(held.vector, made, [0])
        return held.vector[0]

    def number(self, held, cache, page, head, offset, component):
        """One component of a position in float32; writes statements if the cache is quantized."""
        if self.quantized is None:
            return f32(cache[page, head, offset, component])
        self._bring(held, cache, page, head, offset, component // WIDTH)
        shift = T.Cast("uint32", component % WIDTH * BYTE)
        return f32(T.shift_right(held.words[0], shift) & T.uint32(0xFF)) * held.unit[0] + held.unit[1]

    def _bring(self, held, cache, page, head, offset, d) -> None:
        """Load the components of vector `d`, a byte each, and its group's scale and offset."""
        layout = self.quantized
        word, pair = layout.code_place(offset, d), layout.pair_place(offset, d)
        T.buffer_store(held.words, layout.four(cache[page, head, *layout.index(word)], d), [0])
        T.buffer_store(held.words, cache[page, head, *layout.index(pair)], [1])
        for which in range(2):
            T.buffer_store(held.unit, half_of(held.words[1], high=which == 1), [which])


@dataclass(frozen=True)
class LoadLocals:
    """Locals for loading: the words of four components and of their group's scale and offset; these as
    numbers; the vector.
    """

    words: Any
    unit: Any
    vector: Any


def half_of(word, *, high: bool):
    """The float16 in a half of a word as float32.

    Subnormal numbers are converted exactly: a GPU may take them for zeros, and in a group of small values
    both scale and offset can be subnormal.
    """
    bits = T.shift_right(word, T.uint32(16)) if high else word
    mantissa = f32(bits & T.uint32(_F16_MANTISSA)) * exactly(SUBNORMAL)
    small = T.Select((bits & T.uint32(_F16_SIGN)) == T.uint32(0), mantissa, T.float32(0) - mantissa)
    whole = high_half(word) if high else low_half(word)
    return T.Select((bits & T.uint32(_F16_EXPONENT)) == T.uint32(0), small, whole)
