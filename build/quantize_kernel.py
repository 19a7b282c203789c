"""The search of `quantize` as a TIR kernel, which LLVM turns into one fused vector loop a pass.

The same passes in NumPy took 15 times as long: each is eight sweeps over a buffer there, and one here.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import tirx
from tvm.script import tirx as T

from nearfar.targets.base import Array

LANES = 16  # groups that one loop iteration works on, each in a vector lane
SMALLEST = 2.0**-14  # the smallest normal float16
LARGEST = 65504.0

# Starting ranges, narrower by STEP of the group's own each, and least-squares refits of each. On Gaussian weights at 4
# bits, group 64, the squared error against min-max: 2 starts, 7 refits 0.823; 2, 5: 0.829; 4, 3: 0.832; 1, 15: 0.850.
STARTS = {4: 2, 8: 2}
STEP = {4: 0.12, 8: 0.01}
REFITS = {4: 5, 8: 3}

# Rows of the per-lane state.
LOW, HIGH, TOTAL, SCALE, BIAS, INVERSE, SHIFT, SQ, SQQ, SQW, ERROR, BEST, BEST_SCALE, BEST_BIAS, SPREAD, SLOPE, CODE = (
    range(17)
)

Search = Callable[[npt.NDArray[np.float32], npt.NDArray[np.uint8], npt.NDArray[np.float32]], None]


def _float16(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Round a float32 that is 0 or in float16's normal range to float16's 11 bits, ties to even."""
    bits = T.reinterpret("uint32", value)
    odd = (bits >> T.uint32(13)) & T.uint32(1)
    return T.reinterpret("float32", (bits + T.uint32(0xFFF) + odd) & T.uint32(0xFFFFE000))


def _scale(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Round a scale to float16, never subnormal."""
    return _float16(T.min(T.max(value, T.float32(SMALLEST)), T.float32(LARGEST)))


def _bias(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Round a bias to float16, zero instead of subnormal."""
    bounded = T.min(T.max(value, T.float32(-LARGEST)), T.float32(LARGEST))
    return T.Select(T.fabs(value) < T.float32(SMALLEST), T.float32(0), _float16(bounded))


def search_func(bits: int, group: int) -> tirx.PrimFunc:
    """Make the kernel: w float32 [blocks, LANES, group] in; codes uint8 alike, params float32 [blocks, 2, LANES] out.

    params hold the scale, then the bias, of each group. Weights must be finite and within float16's range.
    """
    top, starts, step, refits = float(2**bits - 1), STARTS[bits], STEP[bits], REFITS[bits]

    @T.prim_func(private=True)  # type: ignore[untyped-decorator]
    def search(w_handle: T.handle, codes_handle: T.handle, params_handle: T.handle) -> None:
        blocks = T.int32()
        w = T.match_buffer(w_handle, (blocks, LANES, group), "float32")
        codes = T.match_buffer(codes_handle, (blocks, LANES, group), "uint8")
        params = T.match_buffer(params_handle, (blocks, 2, LANES), "float32")
        for block in T.parallel(blocks):
            x = T.alloc_buffer((group, LANES), "float32", scope="local")
            s = T.alloc_buffer((17, LANES), "float32", scope="local")
            for i, lane in T.grid(group, LANES):
                x[i, lane] = w[block, lane, i]
            for v in T.vectorized(LANES):
                s[LOW, v] = x[0, v]
                s[HIGH, v] = x[0, v]
                s[TOTAL, v] = T.float32(0)
                s[BEST, v] = T.float32(3.0e38)
            for i in range(group):
                for v in T.vectorized(LANES):
                    s[LOW, v] = T.min(s[LOW, v], x[i, v])
                    s[HIGH, v] = T.max(s[HIGH, v], x[i, v])
                    s[TOTAL, v] = s[TOTAL, v] + x[i, v]
            for start in range(starts):
                for v in T.vectorized(LANES):
                    s[SPREAD, v] = (s[HIGH, v] - s[LOW, v]) * (T.float32(step / 2) * T.Cast("float32", start))
                    s[SCALE, v] = _scale((s[HIGH, v] - s[LOW, v] - s[SPREAD, v] - s[SPREAD, v]) / T.float32(top))
                    s[BIAS, v] = _bias(s[LOW, v] + s[SPREAD, v])
                for _refit in range(refits + 1):
                    for v in T.vectorized(LANES):
                        s[INVERSE, v] = T.float32(1) / s[SCALE, v]
                        s[SHIFT, v] = s[BIAS, v] * s[INVERSE, v]
                        s[SQ, v] = T.float32(0)
                        s[SQQ, v] = T.float32(0)
                        s[SQW, v] = T.float32(0)
                    for i in range(group):
                        for v in T.vectorized(LANES):
                            # a buffer row, as TVM 0.27's vectorizer gets a scalar bound here wrong
                            s[CODE, v] = T.min(
                                T.max(T.nearbyint(x[i, v] * s[INVERSE, v] - s[SHIFT, v]), T.float32(0)), T.float32(top)
                            )
                            s[SQ, v] = s[SQ, v] + s[CODE, v]
                            s[SQQ, v] = s[SQQ, v] + s[CODE, v] * s[CODE, v]
                            s[SQW, v] = s[SQW, v] + s[CODE, v] * x[i, v]
                    for v in T.vectorized(LANES):
                        # the squared error without the constant sum of w squared
                        s[ERROR, v] = s[SCALE, v] * (
                            s[SCALE, v] * s[SQQ, v] - T.float32(2) * s[SQW, v] + T.float32(2) * s[BIAS, v] * s[SQ, v]
                        ) + s[BIAS, v] * (T.float32(group) * s[BIAS, v] - T.float32(2) * s[TOTAL, v])
                        s[BEST_SCALE, v] = T.Select(s[ERROR, v] < s[BEST, v], s[SCALE, v], s[BEST_SCALE, v])
                        s[BEST_BIAS, v] = T.Select(s[ERROR, v] < s[BEST, v], s[BIAS, v], s[BEST_BIAS, v])
                        s[BEST, v] = T.min(s[ERROR, v], s[BEST, v])
                        # least squares given the codes; where all codes are equal the scale stays
                        s[SPREAD, v] = T.float32(group) * s[SQQ, v] - s[SQ, v] * s[SQ, v]
                        s[SLOPE, v] = (T.float32(group) * s[SQW, v] - s[SQ, v] * s[TOTAL, v]) / T.max(
                            s[SPREAD, v], T.float32(1)
                        )
                        s[SCALE, v] = _scale(
                            T.Select(
                                T.And(s[SPREAD, v] > T.float32(0), s[SLOPE, v] > T.float32(0)), s[SLOPE, v], s[SCALE, v]
                            )
                        )
                        s[BIAS, v] = _bias((s[TOTAL, v] - s[SCALE, v] * s[SQ, v]) / T.float32(group))
            for v in T.vectorized(LANES):
                s[INVERSE, v] = T.float32(1) / s[BEST_SCALE, v]
                s[SHIFT, v] = s[BEST_BIAS, v] * s[INVERSE, v]
                params[block, 0, v] = s[BEST_SCALE, v]
                params[block, 1, v] = s[BEST_BIAS, v]
            for i in range(group):
                for v in T.vectorized(LANES):
                    x[i, v] = T.min(
                        T.max(T.nearbyint(x[i, v] * s[INVERSE, v] - s[SHIFT, v]), T.float32(0)), T.float32(top)
                    )
            for lane, i in T.grid(LANES, group):
                codes[block, lane, i] = T.Cast("uint8", x[i, lane])

    return search


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
    """Make an uninitialised array at the 64-byte alignment that TVM's kernels need."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + size].view(dtype).reshape(shape)


@cache
def compiled_search(bits: int, group: int) -> Search:
    """Compile the kernel for this machine; it runs on all cores. Its arrays must be of `aligned_empty`."""
    module = tvm.IRModule({"search": search_func(bits, group).with_attr("global_symbol", "search")})
    function = tvm.compile(module, target=_target())["search"]

    def search(w: Array, codes: Array, params: Array) -> None:
        function(*(tvm.runtime.from_dlpack(array) for array in (w, codes, params)))

    return search


def _target() -> tvm.target.Target:
    """Name this machine, as x86-64-v3 where it is one: all such machines then give one result."""
    codegen = tvm.target.codegen
    here = tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()})
    if platform.machine().lower() in ("x86_64", "amd64") and codegen.llvm_cpu_has_features("avx2", here):
        return tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
    return tvm.target.Target("llvm")
