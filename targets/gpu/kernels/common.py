"""What the GPU kernels share: weight decoding, parameter selection, sizes."""

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
"""Bits of a float32 without its sign, and what they are of an infinity: above are NaNs."""
LEADING_F16 = 0xFFFFE000
"""Bits of a float32 that a float16 has, too."""


def ceil_div(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


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
    """A float32 by its bits: TVM writes seven digits into WGSL, which make 2^-126 a number that GPUs take for
    0.
    """
    return T.reinterpret("float32", T.uint32(int(np.float32(value).view(np.uint32))))


def stored(value, dtype: str):
    """A float32 as the dtype of a buffer; float16 saturates.

    An infinity would make NaN of all that is computed from it. A NaN stays: its bits say so, for a comparison
    may become a minimum (NVIDIA's compiler does that), and that of a NaN and a number is the number.
    """
    if dtype != "float16":
        return T.Cast(dtype, value)
    number = T.reinterpret("uint32", value) & T.uint32(SIZE_F32) <= T.uint32(INFINITE_F32)
    return T.Cast(dtype, T.Select(number, saturated(value), value))


def saturated(value):
    """A number within what float16 holds; what becomes of a NaN is the device's affair."""
    return T.max(T.min(value, T.float32(MOST_F16)), T.float32(-MOST_F16))


def leading(value, dtype: str):
    """The leading digits of a float32, as many as the dtype of a buffer has: `stored` loses nothing of them.

    By bits: float16 and back is nothing to a compiler that cares for numbers only (NVIDIA's).
    """
    if dtype != "float16":
        return value
    return T.reinterpret("float32", T.reinterpret("uint32", value) & T.uint32(LEADING_F16))


def select(func: tirx.PrimFunc, names: list[str], symbol: str) -> tirx.PrimFunc:
    """The function with the parameters named only: TVMScript signatures are fixed, jobs' are not."""
    by_name = {param.name: param for param in func.params}
    made = tirx.PrimFunc([by_name[name] for name in names], func.body, func.ret_type, func.attrs)
    return finish(made, symbol)


def finish(func: tirx.PrimFunc, symbol: str) -> tirx.PrimFunc:
    """Name the function and mark it for our lowering pipeline."""
    return func.with_attr("global_symbol", symbol).with_attr(EXPLICIT_SYNC, 1)
