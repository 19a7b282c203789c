"""The search of `quantize` as a TIR kernel: sixteen groups a vector, one fused loop a pass.

It is written with the CPU target's vector vocabulary, which names every vector. T.vectorized loops over the
same formulas left the rounding, and so the loop, scalar (five times as long), and NumPy sweeps a buffer for
each operation.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.build.weights.slab import LANES, LARGEST, PARAMS, WORD
from nearfar.kernels.quantized import Array
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.llvm.passes import PIPELINE

HALVES = tuple(range(LANES // v.LANES))
SMALLEST = 2.0**-14  # the smallest normal float16

# Starting ranges, narrower by STEP of the group's own each, and least-squares refits of each. On Gaussian
# weights at 4 bits, group 64, the squared error against min-max: 2 starts, 7 refits 0.823; 2, 5: 0.829; 4, 3:
# 0.832; 1, 15: 0.850. Fewer bits gain from narrower ranges: on the 7M model's weights a step of 0.3 takes 1.3
# % off the error at 2 bits, and one of 0.2 takes 0.6 % off at 3 bits; at 4 bits both add. Twice as many
# passes take off 1 to 2 % at any number of bits.
STARTS = {2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 8: 2}
STEP = {2: 0.3, 3: 0.2, 4: 0.12, 5: 0.07, 6: 0.04, 8: 0.01}
REFITS = {2: 5, 3: 5, 4: 5, 5: 4, 6: 4, 8: 3}


LEAST_SPREAD = 1e-2

F32 = npt.NDArray[np.float32]
Expr = Any  # tirx expressions carry their operators at run time only
Search = Callable[[Array, npt.NDArray[np.uint16], npt.NDArray[np.float32], F32 | None], None]


def search_func(
    bits: int, group: int, source: str, weighted: bool = False, centred: bool = False
) -> tirx.PrimFunc:
    """Make the kernel: w [blocks, LANES, group] in; words uint16 [blocks, LANES, group*bits/16], params
    float32 [blocks, 5, LANES] out.

    `source` "float32", or "bfloat16": then w is uint16, its bits. words hold the codes as MLX packs them, the
    first in the lowest bits; params are PARAMS of each group. Where a group's statistics are not finite, or
    beyond float16, its other results are invalid. `weighted`: one more input, h float32 [groups a row,
    group], weights each input's squared error; its mean over a group is 1. `centred`: the code 2^(bits - 1)
    stands for 0, which fixes the bias; the scale may then be negative.
    """
    blocks, per_row = tirx.Var("blocks", "int32"), tirx.Var("per_row", "int32")
    args = [
        ("w", (blocks, LANES, group), "float32" if source == "float32" else "uint16"),
        ("words", (blocks, LANES, group * bits // WORD), "uint16"),
        ("params", (blocks, len(PARAMS), LANES), "float32"),
        *([("h", (per_row, group), "float32")] if weighted else []),
    ]

    def body(w: Expr, words: Expr, params: Expr, h: Expr = None) -> None:
        with T.serial(0, blocks) as block:
            groups = (_Centred if centred else _Groups)(bits, group, weighted)
            groups.load(w, block)
            if weighted:
                groups.load_importance(h, block, per_row)
            groups.search()
            groups.store(words, params, block)

    return v.prim_func("search", args, body)


class _Groups:
    """LANES groups in the registers of one loop iteration; each method emits a piece of the kernel."""

    def __init__(self, bits: int, group: int, weighted: bool) -> None:
        self.bits, self.group, self.top, self.weighted = bits, group, float(2**bits - 1), weighted
        self.x = v.local((group * LANES,), "float32")  # [group, LANES]
        self.h = v.local((group * LANES,), "float32") if weighted else None
        self.low, self.high, self.total = (v.registers(len(HALVES)) for _ in range(3))
        self.moment = v.registers(len(HALVES)) if weighted else self.total  # the sum of h·w
        self.scale, self.bias, self.inverse, self.shift = (v.registers(len(HALVES)) for _ in range(4))
        self.best, self.best_scale, self.best_bias = (v.registers(len(HALVES)) for _ in range(3))

    def load(self, w: Expr, block: Expr) -> None:
        """Transpose the groups into lanes."""
        with T.serial(0, self.group) as i:
            for lane in range(LANES):
                value = w[block, lane, i]
                if str(w.dtype) == "uint16":
                    value = tirx.reinterpret(
                        "float32", tirx.Cast("uint32", value) << tirx.IntImm("uint32", 16)
                    )
                v.put1(self.x, [i * LANES + lane], value)

    def load_importance(self, h: Expr, block: Expr, per_row: Expr) -> None:
        """Load the importance of the groups' inputs into lanes: group g of the matrix takes entry g modulo
        `per_row`.
        """
        with T.serial(0, self.group) as i:
            for lane in range(LANES):
                group = tirx.truncmod(block * LANES + lane, per_row)
                v.put1(self.h, [i * LANES + lane], h[group, i])

    def counted(self, value: Expr, i: Expr, half: int) -> Expr:
        """The term of input i in a sum over the inputs: weighted by h where the search is weighted."""
        return value * v.lanes(self.h, [i * LANES + half * v.LANES]) if self.weighted else value

    def weights(self, i: Expr, half: int) -> Expr:
        """Weight i of sixteen groups."""
        return v.lanes(self.x, [i * LANES + half * v.LANES])

    def codes(self, x: Expr, half: int) -> Expr:
        """The nearest codes of weights, as float32."""
        rounded = tirx.nearbyint(x * self.inverse[half] - self.shift[half])
        return tirx.min(tirx.max(rounded, v.splat(0.0)), v.splat(self.top))

    def search(self) -> None:
        """Find the scale and bias with the least squared error, from each starting range in turn."""
        for h in HALVES:
            for register in (self.low, self.high):
                v.put1(register, [h], self.weights(tirx.IntImm("int32", 0), h))
            v.put1(self.total, [h], v.splat(0.0))
            v.put1(self.best, [h], v.splat(3.0e38))
            if self.weighted:
                v.put1(self.moment, [h], v.splat(0.0))
        with T.serial(0, self.group) as i:
            for h in HALVES:
                x = self.weights(i, h)
                v.put1(self.low, [h], tirx.min(self.low[h], x))
                v.put1(self.high, [h], tirx.max(self.high[h], x))
                v.put1(self.total, [h], self.total[h] + x)
                if self.weighted:
                    v.put1(self.moment, [h], self.moment[h] + self.counted(x, i, h))
        with T.serial(0, self.starts) as start:
            self._start(start)
            with T.serial(0, REFITS[self.bits] + 1):
                self._refit()

    @property
    def starts(self) -> int:
        """The number of starting ranges."""
        return STARTS[self.bits]

    def _start(self, start: Expr) -> None:
        """Set scale and bias of a starting range, the narrower the later."""
        clipped = tirx.Cast("float32", start) * v.f32(STEP[self.bits] / 2)
        for h in HALVES:
            spread = v.keep((self.high[h] - self.low[h]) * tirx.Broadcast(clipped, v.LANES))
            width = self.high[h] - self.low[h] - spread - spread
            v.put1(self.scale, [h], _scale(width / v.splat(self.top)))
            v.put1(self.bias, [h], _bias(self.low[h] + spread))

    def _invert(self, scale: Expr, bias: Expr) -> None:
        for h in HALVES:
            v.put1(self.inverse, [h], v.splat(1.0) / scale[h])
            v.put1(self.shift, [h], bias[h] * self.inverse[h])

    def _refit(self) -> None:
        """Emit one pass: codes for the current scale and bias, their error, then least squares given the
        codes.
        """
        sq, sqq, sqw = (v.registers(len(HALVES)) for _ in range(3))
        self._invert(self.scale, self.bias)
        for h in HALVES:
            for register in (sq, sqq, sqw):
                v.put1(register, [h], v.splat(0.0))
        with T.serial(0, self.group) as i:
            for h in HALVES:
                x = self.weights(i, h)
                code = v.keep(self.codes(x, h))
                counted = v.keep(self.counted(code, i, h)) if self.weighted else code
                v.put1(sq, [h], sq[h] + counted)
                v.put1(sqq, [h], sqq[h] + counted * code)
                v.put1(sqw, [h], sqw[h] + counted * x)
        for h in HALVES:
            self._judge(h, sq[h], sqq[h], sqw[h])
            self._least_squares(h, sq[h], sqq[h], sqw[h])

    def _judge(self, h: int, sq: Expr, sqq: Expr, sqw: Expr) -> None:
        """Keep the scale and bias if their error (without the constant Σ w²) is the least so far."""
        scale, bias, two, n = self.scale[h], self.bias[h], v.splat(2.0), v.splat(float(self.group))
        error = v.keep(
            scale * (scale * sqq - two * sqw + two * bias * sq) + bias * (n * bias - two * self.moment[h])
        )
        better = error < self.best[h]
        v.put1(self.best_scale, [h], tirx.Select(better, scale, self.best_scale[h]))
        v.put1(self.best_bias, [h], tirx.Select(better, bias, self.best_bias[h]))
        v.put1(self.best, [h], tirx.min(error, self.best[h]))

    def _least_squares(self, h: int, sq: Expr, sqq: Expr, sqw: Expr) -> None:
        """Solve the normal equations; where all codes are equal the scale stays."""
        n, zero = v.splat(float(self.group)), v.splat(0.0)
        spread = v.keep(n * sqq - sq * sq)
        # With equal weights the spread is an integer; with others a value near 0 is a rounding error.
        least, above = (LEAST_SPREAD, LEAST_SPREAD) if self.weighted else (1.0, 0.0)
        slope = v.keep((n * sqw - sq * self.moment[h]) / tirx.max(spread, v.splat(least)))
        slope = v.keep(tirx.Select(spread > v.splat(above), slope, zero))
        v.put1(self.scale, [h], _scale(tirx.Select(slope > zero, slope, self.scale[h])))
        v.put1(self.bias, [h], _bias((self.moment[h] - self.scale[h] * sq) / n))

    def store(self, words: Expr, params: Expr, block: Expr) -> None:
        """Pack the codes of the best scale and bias, 16 codes into `bits` words at a time; write the
        parameters.
        """
        self._invert(self.best_scale, self.best_bias)
        for row, register in enumerate((self.best_scale, self.best_bias, self.low, self.high, self.total)):
            for h in HALVES:
                v.put(params, [block, row, h * v.LANES], register[h])
        packed = v.local((LANES * self.bits,), "uint32")
        with T.serial(0, self.group // WORD) as chunk:
            for h in HALVES:
                word = v.registers(self.bits, v.U32X16)
                for j in range(self.bits):
                    v.put1(word, [j], v.isplat(0, "uint32"))
                for i in range(WORD):
                    self._pack(word, chunk * WORD + i, i * self.bits, h)
                for j in range(self.bits):
                    v.put(packed, [j * LANES + h * v.LANES], word[j])
            for lane in range(LANES):
                for j in range(self.bits):
                    half = tirx.Cast("uint16", packed[j * LANES + lane] & tirx.IntImm("uint32", 0xFFFF))
                    v.put1(words, [block, lane, chunk * self.bits + j], half)

    def _pack(self, word: Expr, i: Expr, bit: int, h: int) -> None:
        """Put code i at `bit` of the words; where `bits` does not divide 16, a code can straddle two."""
        code = v.keep(v.bits(v.cast(self.codes(self.weights(i, h), h), v.I32X16), v.U32X16), v.U32X16)
        j, shift = divmod(bit, WORD)
        v.put1(word, [j], word[j] | (code << v.isplat(shift, "uint32")))
        if shift + self.bits > WORD:
            v.put1(word, [j + 1], word[j + 1] | (code >> v.isplat(WORD - shift, "uint32")))


class _Centred(_Groups):
    """Groups without a bias of their own: a weight is scale · (code − zero)."""

    def __init__(self, bits: int, group: int, weighted: bool) -> None:
        super().__init__(bits, group, weighted)
        self.zero = float(2 ** (bits - 1))

    @property
    def starts(self) -> int:
        """Each starting range with either sign of the scale: there is one code more below 0 than above."""
        return 2 * STARTS[self.bits]

    def _start(self, start: Expr) -> None:
        clipped = tirx.Cast("float32", start >> v.i32(1)) * v.f32(STEP[self.bits])
        sign = tirx.Cast("float32", v.i32(1) - (start & v.i32(1)) * v.i32(2))
        part = (v.f32(1.0) - clipped) * sign / v.f32(-self.zero)
        for h in HALVES:
            low, high = self.low[h], self.high[h]
            farthest = v.keep(tirx.Select(high > v.splat(0.0) - low, high, low))
            self._put_scale(h, farthest * tirx.Broadcast(part, v.LANES))

    def _least_squares(self, h: int, sq: Expr, sqq: Expr, sqw: Expr) -> None:
        """Solve the normal equation of the scale; where all codes stand for 0 the scale stays."""
        zero, n = v.splat(self.zero), v.splat(float(self.group))
        squares = v.keep(sqq - (sq + sq - n * zero) * zero)
        slope = v.keep((sqw - zero * self.moment[h]) / tirx.max(squares, v.splat(LEAST_SPREAD)))
        found = (squares > v.splat(LEAST_SPREAD)) & (tirx.abs(slope) > v.splat(0.0))
        self._put_scale(h, tirx.Select(found, slope, self.scale[h]))

    def _put_scale(self, h: int, value: Expr) -> None:
        """Round a scale of either sign to float16, never subnormal, and keep it with its bias."""
        value = v.keep(value)
        size = tirx.max(tirx.abs(value), v.splat(SMALLEST))
        size = v.keep(_float16(tirx.min(size, v.splat(LARGEST / self.zero))))
        v.put1(self.scale, [h], tirx.Select(value < v.splat(0.0), v.splat(0.0) - size, size))
        v.put1(self.bias, [h], self.scale[h] * v.splat(-self.zero))


def _float16(value: Expr) -> Expr:
    """Round float32 that is 0 or in float16's normal range to float16's 11 bits, ties to even."""
    bits = v.keep(v.bits(value, v.U32X16), v.U32X16)
    odd = (bits >> v.isplat(13, "uint32")) & v.isplat(1, "uint32")
    return v.bits((bits + v.isplat(0xFFF, "uint32") + odd) & v.isplat(0xFFFFE000, "uint32"), v.F32X16)


def _scale(value: Expr) -> Expr:
    """Round scales to float16, never subnormal."""
    return _float16(tirx.min(tirx.max(value, v.splat(SMALLEST)), v.splat(LARGEST)))


def _bias(value: Expr) -> Expr:
    """Round biases to float16, zero instead of subnormal."""
    value = v.keep(value)
    bounded = tirx.min(tirx.max(value, v.splat(-LARGEST)), v.splat(LARGEST))
    return tirx.Select(tirx.abs(value) < v.splat(SMALLEST), v.splat(0.0), _float16(bounded))


@cache
def compiled_search(
    bits: int, group: int, source: str, weighted: bool = False, centred: bool = False
) -> Search:
    """Compile the kernel for this machine; a call runs on the calling thread, without the interpreter's lock.

    Its arrays must be of `aligned_empty`. The last, importance, is None where the search is not weighted.
    """
    func = search_func(bits, group, source, weighted, centred).with_attr("global_symbol", "search")
    module = tvm.IRModule({"search": func})
    function = tvm.tirx.build(module, target=_target(), pipeline=PIPELINE)["search"]

    def search(w: Array, words: npt.NDArray[np.uint16], params: F32, h: F32 | None = None) -> None:
        arrays = (w, words, params) if h is None else (w, words, params, h)
        function(*(tvm.runtime.from_dlpack(array) for array in arrays))

    return search


def _target() -> tvm.target.Target:
    """The TVM target of this machine; x86-64-v3 where it supports that, so that all such machines give one
    result.
    """
    codegen = tvm.target.codegen
    here = tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()})
    if platform.machine().lower() in ("x86_64", "amd64") and codegen.llvm_cpu_has_features("avx2", here):
        return tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
    return tvm.target.Target("llvm")
