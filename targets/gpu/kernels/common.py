"""Helpers that the GPU kernels share: decoding of weights, selection of parameters, sizes."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from nearfar.targets.gpu.tir_passes import EXPLICIT_SYNC

LOW_HALF, HIGH_HALF = "low_half", "high_half"

# WGSL rejects a constant expression that is infinite, so "minus infinity" is the lowest finite float32.
LOWEST = -3.4028234663852886e38
HIGHEST = -LOWEST
MOST_F16 = 65504.0
SIZE_F32, INFINITE_F32 = 0x7FFFFFFF, 0x7F800000
"""A mask for a float32's bits without its sign, and the bits of infinity; larger ones are NaN."""
LEADING_F16 = 0xFFFFE000
"""A mask for the bits of a float32 that a float16 has too."""


def ceil_div(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


MANTISSA, EXPONENT_BIAS = 23, 127
"""Bits of a float32's mantissa, and what is added to its exponent."""


def lifted_bits(count: int) -> int:
    """The bits of the float32 2^23 + count."""
    return (EXPONENT_BIAS + MANTISSA) << MANTISSA | count


def low_half(word):
    """The float16 in the low half of a word, as float32; see FUNCTIONS of webgpu, intrinsics of vulkan."""
    return T.call_pure_extern("float32", LOW_HALF, word)


def high_half(word):
    """The float16 in the high half of a word, as float32."""
    return T.call_pure_extern("float32", HIGH_HALF, word)


def f32(value):
    """Cast to float32."""
    return T.Cast("float32", value)


def exactly(value: float):
    """A float32 given by its bits: TVM writes seven digits into WGSL, with which 2^-126 becomes a number that
    GPUs take for 0.
    """
    return T.reinterpret("float32", T.uint32(int(np.float32(value).view(np.uint32))))


def constant(value: float):
    """A known float32. TVM writes seven digits into WGSL: longer ones are written as bits."""
    return T.float32(float(value)) if float(f"{value:.6e}") == value else exactly(value)


def fma(a, b, c):
    """a·b + c, one instruction on every GPU; numbers or vectors with the dtype of `a`."""
    return T.call_pure_extern(str(a.ty.dtype), "fma", a, b, c)


def stored(value, dtype: str):
    """A float32 as a buffer with dtype `dtype` stores it; float16 saturates.

    An infinity would turn every result computed from it into NaN. NaN stays NaN, tested by its bits: a
    comparison may become a minimum (NVIDIA's compiler does that), and the minimum of NaN and a number is the
    number.
    """
    if dtype != "float16":
        return T.Cast(dtype, value)
    number = T.reinterpret("uint32", value) & T.uint32(SIZE_F32) <= T.uint32(INFINITE_F32)
    return T.Cast(dtype, T.Select(number, saturated(value), value))


def saturated(value):
    """A number clamped to float16's range; devices differ in the result for NaN."""
    return T.max(T.min(value, T.float32(MOST_F16)), T.float32(-MOST_F16))


def leading(value, dtype: str):
    """The leading digits of a float32, as many as `dtype` has, so that `stored` loses nothing.

    It masks bits: compilers that only care for numbers (NVIDIA's) drop a conversion to float16 and back.
    """
    if dtype != "float16":
        return value
    return T.reinterpret("float32", T.reinterpret("uint32", value) & T.uint32(LEADING_F16))


def select(func: tirx.PrimFunc, names: list[str], symbol: str) -> tirx.PrimFunc:
    """A function with only the named parameters: TVMScript's signatures are fixed, and jobs differ."""
    by_name = {param.name: param for param in func.params}
    made = tirx.PrimFunc([by_name[name] for name in names], func.body, func.ret_type, func.attrs)
    return finish(made, symbol)


def finish(func: tirx.PrimFunc, symbol: str) -> tirx.PrimFunc:
    """Name the function and mark it for our lowering pipeline."""
    return func.with_attr("global_symbol", symbol).with_attr(EXPLICIT_SYNC, 1)
