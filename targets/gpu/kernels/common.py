"""What the GPU kernels share: weight decoding, parameter selection, sizes."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.targets.gpu.tir_passes import EXPLICIT_SYNC

LOW_HALF, HIGH_HALF = "low_half", "high_half"

# WGSL rejects a constant expression that is infinite, so "minus infinity" is the lowest finite float32.
LOWEST = -3.4028234663852886e38
HIGHEST = -LOWEST
MOST_F16 = 65504.0


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


def stored(value, dtype: str):
    """A float32 as the dtype of a buffer; float16 saturates.

    An infinity would make NaN of all that is computed from it. A NaN stays.
    """
    if dtype != "float16":
        return T.Cast(dtype, value)
    below = T.Select(value > T.float32(MOST_F16), T.float32(MOST_F16), value)
    return T.Cast(dtype, T.Select(below < T.float32(-MOST_F16), T.float32(-MOST_F16), below))


def select(func: tirx.PrimFunc, names: list[str], symbol: str) -> tirx.PrimFunc:
    """The function with the parameters named only: TVMScript signatures are fixed, jobs' are not."""
    by_name = {param.name: param for param in func.params}
    made = tirx.PrimFunc([by_name[name] for name in names], func.body, func.ret_type, func.attrs)
    return finish(made, symbol)


def finish(func: tirx.PrimFunc, symbol: str) -> tirx.PrimFunc:
    """Name the function and mark it for our lowering pipeline."""
    return func.with_attr("global_symbol", symbol).with_attr(EXPLICIT_SYNC, 1)
