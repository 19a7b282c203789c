"""How the scales of a quantized matrix are stored, what its codes stand for, and how many bytes it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

CODE_BITS = (2, 3, 4, 5, 6, 8)
"""Bits that a code can have."""
GROUP_SIZES = (16, 32, 64, 128)
"""Numbers of inputs that can share a scale, or a scale and an offset."""
FLOAT_BITS = (16, 32)
"""Bits of the weights of a matrix that is not quantized."""
HALF = 16
"""Bits of a float16."""
SCALE_BITS = (4, 6, 8)
"""Bits that an integer scale can have."""
OF_KQUANTS = 256
"""The inputs of a superblock in llama.cpp's k-quants."""
Table = Literal["iq4"]
"""The name of a table of codes' values."""
TABLES: Mapping[Table, tuple[int, ...]] = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""The values of the codes 0, 1, … by table, each an integer of 8 bits. `iq4` is that of IQ4_NL and IQ4_XS."""
TABLE_BITS = 4
"""Bits of codes to which a table gives values."""
VALUE_BITS = 8
"""Bits of a table's values, as codes that need no table."""


@dataclass(frozen=True)
class Scales:
    """How the groups of a matrix store their scales, and what a code stands for. A weight is scale · code +
    offset.

    `bits`: bits of a group's scale; 16: a float16, fewer: an integer, which the float16 of its superblock
    multiplies. `offsets`: whether a group stores an offset of as many bits (with integers: the weight is
    scale · code − offset, and a superblock has a second float16). Without offsets a weight is scale · (code −
    2^(bits of a code − 1)), and an integer scale is signed: 2^(bits − 1) is subtracted from what is stored.
    `superblock`: the number of inputs that share float16 factors; 0: scales have one level. `table`: a weight
    is scale · the value that this table of TABLES has for its code; there are no offsets.
    """

    bits: int = HALF
    offsets: bool = True
    superblock: int = 0
    table: Table | None = None

    @property
    def values(self) -> int:
        """The number of values that a group stores: a scale, or a scale and an offset."""
        return 1 + self.offsets

    @property
    def label(self) -> str:
        """The suffix of a scheme's name in kernels' names: nothing for float16 pairs, `s` for scales alone,
        such as `k6` for integers without offsets, and `k6o` for integers with offsets; `k6ox448` where
        superblocks do not have 256 inputs; then the table's name.
        """
        named = self.table or ""
        if not self.superblock:
            return named if self.offsets else "s" + named
        of = "" if self.superblock == OF_KQUANTS else f"x{self.superblock}"
        return f"k{self.bits}" + "o" * self.offsets + of + named

    @property
    def form(self) -> Scales:
        """The way with superblocks of 256, whatever their length is: targets store all lengths or none."""
        return replace(self, superblock=OF_KQUANTS) if self.superblock else self

    @property
    def words(self) -> str:
        """The way of storing scales in words, for messages."""
        if self.table:
            return f"{self.linear.words} and the table {self.table}"
        if not self.superblock:
            return "float16 scales and offsets" if self.offsets else "float16 scales"
        what = "scales and offsets" if self.offsets else "scales"
        return f"{what} of {self.bits} bits in superblocks of {self.superblock}"

    @property
    def linear(self) -> Scales:
        """The way of storing the same scales for codes without a table."""
        return replace(self, table=None) if self.table else self

    @property
    def centre(self) -> int:
        """The number that is subtracted from a stored integer scale."""
        return 0 if self.offsets else 1 << (self.bits - 1)

    def zero(self, bits: int) -> int:
        """The code of the weight 0 where groups store no offset, for codes of `bits` bits; 0 with offsets,
        and with a table, whose values are signed.
        """
        return 0 if self.offsets or self.table else 1 << (bits - 1)

    def fits(self, k: int) -> bool:
        """Whether rows of k inputs are whole superblocks."""
        return not self.superblock or k % self.superblock == 0

    def bytes(self, n: int, k: int, group: int) -> int:
        """Bytes of the scales and offsets of a matrix [n, k] in groups of `group` inputs."""
        bits = k // group * self.values * self.bits
        if self.superblock:
            bits += k // self.superblock * self.values * HALF
        return n * bits // 8


PAIRS = Scales()
"""A float16 scale and a float16 offset for each group: the layout of MLX."""
SYMMETRIC = Scales(offsets=False)
"""A float16 scale for each group: Q4_0, Q5_0, Q8_0, symmetric GPTQ and compressed-tensors."""
ONE_LEVEL = (PAIRS, SYMMETRIC)
"""The ways without superblocks."""
OF_GGUF = {
    "Q2_K": Scales(4, True, OF_KQUANTS), "Q3_K": Scales(6, False, OF_KQUANTS),
    "Q4_K": Scales(6, True, OF_KQUANTS), "Q5_K": Scales(6, True, OF_KQUANTS),
    "Q6_K": Scales(8, False, OF_KQUANTS),
}  # fmt: skip
"""Two levels, by the names of GGUF's types."""
IQ4 = {"IQ4_NL": Scales(offsets=False, table="iq4"), "IQ4_XS": Scales(6, False, OF_KQUANTS, "iq4")}
"""The ways with a table, by the names of GGUF's types."""
ALL = (*ONE_LEVEL, *dict.fromkeys(OF_GGUF.values()), *IQ4.values())
"""All ways, each with superblocks of one length (Scales.form)."""


def matrix_bytes(n: int, k: int, bits: int, group: int, scales: Scales = PAIRS) -> int:
    """Bytes of a matrix [n, k] of codes, with its scales; `group` 0: of values of `bits` bits without
    scales.
    """
    return n * k * bits // 8 + (scales.bytes(n, k, group) if group else 0)
