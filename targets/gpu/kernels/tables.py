"""The integers that codes stand for, where a matrix's scheme has a table (format.scales.TABLES).

They are computed: the values lie near a polynomial of the codes, and the integers nearest to it are exactly
the values. Constant arrays would be loads: drivers keep those with computed indices in memory. Kernels that
use a value for few products look it up in workgroup memory (linear/lookup.py; docs/decisions/0028).
"""

# mypy: ignore-errors
# TVMScript: what is built here are expressions, and statements of the kernel that is being parsed.
from __future__ import annotations

from collections.abc import Mapping

from tvm.script import tirx as T

from nearfar.format.scales import VALUE_BITS, Table
from nearfar.targets.gpu.kernels.common import MANTISSA, constant, fma, lifted_bits

POLYNOMIALS: Mapping[Table, tuple[float, ...]] = {
    "iq4": (-127, 24.5006, -1.43856, 0.0362732, 0.00144802),
}
"""By table the coefficients of the polynomial, the constant first: an integer. No value is further than 0.44
from it, so float32 rounds it to the value, whether or not products and sums are fused.
"""
ROUNDING = 1 << MANTISSA - 1
"""With 2^23 and this number added, a float32 is rounded to an integer, which is then added to their bits."""
ZERO = 1 << (VALUE_BITS - 1)
"""The number that makes each value positive."""


def value_bits(table: Table, codes):
    """The values of codes (float32, a number or a vector), uint32: the low 8 bits are those of an int8."""
    code = T.Bind(codes)
    first, *others = POLYNOMIALS[table]
    *factors, last = [(1 << MANTISSA) + ROUNDING + first, *others]
    made = _like(code, constant(last))
    for factor in reversed(factors):
        made = _added(made, code, _like(code, constant(factor)))
    return T.reinterpret(_kind(code, "uint32"), made)


def byte_of(table: Table, codes):
    """The values of codes (float32, a number or a vector) as the bits of int8, uint32."""
    bits = value_bits(table, codes)
    return bits & _like(bits, T.uint32((1 << VALUE_BITS) - 1))


def value_of(table: Table, codes):
    """The values of codes (float32, a number or a vector), float32.

    The number that rounds is taken away from the bits first: a compiler may drop a number that is added and
    then subtracted, as if nothing had been rounded (Metal's and Direct3D's do, as browsers call them).
    """
    bits = value_bits(table, codes)
    bits = bits - _like(bits, T.uint32(lifted_bits(ROUNDING) - lifted_bits(ZERO)))
    return T.reinterpret(_kind(bits, "float32"), bits) - _like(bits, constant((1 << MANTISSA) + ZERO))


def _lanes(value) -> int:
    return int(value.ty.dtype.lanes)


def _kind(value, of: str) -> str:
    """The dtype with as many numbers as a value has."""
    return f"{of}x{_lanes(value)}" if _lanes(value) > 1 else of


def _like(value, number):
    """A number in all places of a vector like `value`; the number itself if `value` is one."""
    return T.Broadcast(number, _lanes(value)) if _lanes(value) > 1 else number


def _added(a, b, c):
    """a·b + c: software GPUs, whose kernels have no vectors, may have no such instruction."""
    return fma(a, b, c) if _lanes(a) > 1 else a * b + c
