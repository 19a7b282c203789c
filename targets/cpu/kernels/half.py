"""Conversions of float16 in caches and weights to and from float32.

Most units have instructions for them. WebAssembly has no float16: LLVM would call a function for each number,
so there the bits are moved by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.units import Unit

Expr = Any
LARGEST = 65504.0  # the largest float16
EXPONENT = 112 << 23  # the difference of the two formats' exponents, in float32's bits
SIGN_AND_NUMBER = ~(7 << 28)
"""The bits that stay of a float16, whose sign is extended, after a move by 13 places: of four copies of the
sign the highest alone.
"""


def by_hand(unit: Unit, dtype: str) -> bool:
    """Whether a cache of `dtype` is read and written as uint16, with conversions by hand."""
    return unit.architecture == "wasm32" and dtype == "float16"


def load(unit: Unit, cache: Expr, dtype: str, index: Sequence[Any], n: int = v.LANES) -> Expr:
    """Load n values of a cache as float32; `cache` is uint16 if conversions are by hand."""
    value = v.lanes(cache, index, n)
    return widen(unit, value, n) if dtype == "float16" else T.Bind(v.cast(value, f"float32x{n}"))


def widen(unit: Unit, value: Expr, n: int = v.LANES, *, finite: bool = False) -> Expr:
    """Float32 of float16 values, or of their bits: the magnitude's bits move up 13 places, and a product
    corrects the exponent, also for subnormal numbers.

    NaN stays NaN and infinity stays infinity. `finite`: the values include neither, as in weights; then a
    move of the number with its sign extended puts both in their places, in four operations instead of seven.
    """
    if unit.architecture != "wasm32":
        return T.Bind(v.cast(value, f"float32x{n}"))
    scale = v.splat(float(2**112), n)
    if finite:
        signed = T.Bind(v.cast(v.bits(value, f"int16x{n}"), f"int32x{n}") << v.isplat(13, n=n))
        kept = T.Bind(signed & v.isplat(SIGN_AND_NUMBER, n=n))
        return T.Bind(v.bits(kept, f"float32x{n}") * scale)
    whole = T.Bind(v.cast(v.bits(value, f"uint16x{n}"), f"uint32x{n}"))
    small = T.Bind((whole & v.isplat(0x7FFF, "uint32", n)) << v.isplat(13, "uint32", n))
    number = T.Bind(v.bits(v.bits(small, f"float32x{n}") * scale, f"uint32x{n}"))
    infinite = small > v.isplat(0x7BFF << 13, "uint32", n)
    number = tirx.Select(infinite, small | v.isplat(0x7F800000, "uint32", n), number)
    sign = (whole & v.isplat(0x8000, "uint32", n)) << v.isplat(16, "uint32", n)
    return T.Bind(v.bits(number | sign, f"float32x{n}"))


def stored(unit: Unit, dtype: str, value: Expr) -> Expr:
    """A float32 as a cache of `dtype` stores it: float16 saturates, since an infinite key would make every
    score NaN; NaN stays NaN.
    """
    if dtype != "float16":
        return tirx.Cast(dtype, value)
    value, most = T.Bind(value), v.f32(LARGEST)
    low = T.Bind(tirx.Select(value < v.f32(-LARGEST), v.f32(-LARGEST), value))
    fits = T.Bind(tirx.Select(low > most, most, low))
    return _narrow(fits) if by_hand(unit, dtype) else tirx.Cast(dtype, fits)


def _narrow(value: Expr) -> Expr:
    """Float16's bits of a number within its range, rounded to nearest, ties to even."""
    whole = T.Bind(v.bits(value, "int32"))
    size = T.Bind(whole & v.i32(0x7FFFFFFF))
    normal = (size - v.i32(EXPONENT) + v.i32(0xFFF) + ((size >> v.i32(13)) & v.i32(1))) >> v.i32(13)
    # For subnormal results 0.5 is added: then the sum's last bit has the value of a subnormal float16's last
    # bit.
    small = v.bits(v.bits(size, "float32") + v.f32(0.5), "int32") - v.i32(0x3F000000)
    number = T.Bind(tirx.Select(size < v.i32(113 << 23), small, normal))
    number = T.Bind(tirx.Select(size > v.i32(0x7F800000), v.i32(0x7E00), number))
    return tirx.Cast("uint16", number | ((whole >> v.i32(16)) & v.i32(0x8000)))
