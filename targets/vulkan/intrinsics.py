"""Calls of intrinsics: mathematical functions, bits, subgroups."""

from __future__ import annotations

import math
from collections.abc import Callable

from nearfar.errors import BuildError

from .arithmetic import BOOL, F16, F32, I32, U32, Arithmetic, Dtype
from .conversions import Conversions
from .opcodes import GROUP_REDUCE, PACKED_4X8, SCOPE_SUBGROUP, BuiltIn, Capability, Glsl, Opcode

_UNARY = {
    "exp": Glsl.EXP, "exp2": Glsl.EXP2, "log": Glsl.LOG, "log2": Glsl.LOG2, "sqrt": Glsl.SQRT,
    "rsqrt": Glsl.INVERSE_SQRT, "sin": Glsl.SIN, "cos": Glsl.COS, "tan": Glsl.TAN, "asin": Glsl.ASIN,
    "acos": Glsl.ACOS, "atan": Glsl.ATAN, "sinh": Glsl.SINH, "cosh": Glsl.COSH, "tanh": Glsl.TANH,
    "asinh": Glsl.ASINH, "acosh": Glsl.ACOSH, "atanh": Glsl.ATANH, "floor": Glsl.FLOOR, "ceil": Glsl.CEIL,
    "trunc": Glsl.TRUNC, "nearbyint": Glsl.ROUND_EVEN, "rint": Glsl.ROUND_EVEN, "fabs": Glsl.F_ABS,
}  # fmt: skip
_SHUFFLES = ("tvm_warp_shuffle", "tvm_warp_shuffle_up", "tvm_warp_shuffle_down", "tvm_warp_shuffle_xor")
_REDUCE = {
    "subgroup_add": (Opcode.GROUP_I_ADD, Opcode.GROUP_I_ADD, Opcode.GROUP_F_ADD),
    "subgroup_min": (Opcode.GROUP_S_MIN, Opcode.GROUP_U_MIN, Opcode.GROUP_F_MIN),
    "subgroup_max": (Opcode.GROUP_S_MAX, Opcode.GROUP_U_MAX, Opcode.GROUP_F_MAX),
}
# Functions for one word, and for a vector of words, which are computed lane by lane.
_HALVES = {"low_half": 0, "high_half": 1, "low_halves": 0, "high_halves": 1}
_SUBGROUPS = {"subgroup_id": BuiltIn.SUBGROUP_ID, "subgroup_count": BuiltIn.NUM_SUBGROUPS}
DOT = "dot4I8Packed"  # the product of two words of four signed bytes, by WGSL's name
_SPECIAL = (
    DOT,
    *_SUBGROUPS,
    "abs",
    *_HALVES,
    "isnan",
    "isinf",
    "isfinite",
    "popcount",
    "clz",
    *_SHUFFLES,
    "tvm_warp_activemask",
    *_REDUCE,
)


class Intrinsics:
    """Functions by name. Operands are ids; `dtypes` are the operands' dtypes, `dtype` is the result's."""

    def __init__(self, arithmetic: Arithmetic, conversions: Conversions) -> None:
        self._arithmetic, self._conversions, self._builder = arithmetic, conversions, arithmetic.builder
        self.subgroup_size = 0
        """Lanes that a subgroup must have at least; 0 where the code does not care."""
        self._others: dict[str, Callable[[Dtype, list[Dtype], list[int]], int]] = {
            "pow": lambda _, __, v: self._pow(*v),
            "round": lambda _, __, v: self._round(v[0]),
            "log10": lambda _, __, v: self._scaled(Glsl.LOG, v[0], 1 / math.log(10)),
            "atan2": lambda _, __, v: self._glsl(Glsl.ATAN2, *v),
            "fma": lambda _, __, v: self._glsl(Glsl.FMA, *v),
            "fmod": lambda _, __, v: self._arithmetic.binary("mod", F32, *v),
        }

    def has(self, name: str) -> bool:
        """Whether the function `name` is supported."""
        return self._plain(name) in (*_UNARY, *self._others, *_SPECIAL)

    def call(self, name: str, dtype: Dtype, dtypes: list[Dtype], values: list[int]) -> int:
        """The result of a supported function. float16 is computed in float32, as TVM does on a CPU, except
        `fma`.
        """
        name = self._plain(name)
        if name in ("fabs", "abs") and dtype.kind in "iu":
            return values[0] if dtype.kind == "u" else self._absolute(dtype, values[0])
        name = "fabs" if name == "abs" else name
        if name in _HALVES:
            return self._conversions.half(values[0], _HALVES[name])
        if name in ("isnan", "isinf", "isfinite"):
            return self._classify(name, dtypes[0], values[0])
        if name in _SUBGROUPS:
            self._builder.capability(Capability.GROUP_NON_UNIFORM)
            kind = self._builder.int_type()
            return self._builder.pure(Opcode.LOAD, kind, self._builder.built_in(_SUBGROUPS[name], kind))
        if name == DOT:
            return self._dot(*values)
        if name in ("popcount", "clz"):
            return self._bits(name, dtypes[0], values[0])
        if name in _SHUFFLES:
            return self._shuffle(name, dtypes[1], values)
        if name == "tvm_warp_activemask":
            return self._arithmetic.constant(dtype, -1)  # shuffles take no mask here
        if name in _REDUCE:
            return self._reduce(name, dtype, values[0])
        if name == "fma" and dtype == F16:
            return self._builder.glsl(Glsl.FMA, self._arithmetic.computes(F16), *values)
        if dtype.kind != "f":
            raise BuildError(f"{name} of {dtypes[0]} has no SPIR-V code")
        wide = [self._conversions.cast(kind, F32, value) for kind, value in zip(dtypes, values, strict=True)]
        made = self._glsl(_UNARY[name], *wide) if name in _UNARY else self._others[name](F32, dtypes, wide)
        return self._conversions.cast(F32, dtype, made)

    def _plain(self, name: str) -> str:
        """C's name of a float32 function without its final f."""
        return name[:-1] if name.endswith("f") and name[:-1] in (*_UNARY, *self._others) else name

    def _glsl(self, which: Glsl, *values: int) -> int:
        return self._builder.glsl(which, self._arithmetic.type_of(F32), *values)

    def _scaled(self, which: Glsl, value: int, factor: float) -> int:
        return self._arithmetic.binary(
            "mul", F32, self._glsl(which, value), self._arithmetic.constant(F32, factor)
        )

    def _pow(self, base: int, exponent: int) -> int:
        """pow, defined as in C.

        GLSL's pow is undefined below 0, and Mesa's lavapipe, which computes it from exp2 and log2, has 0^-2 =
        0 and loses NaN. A small integer exponent becomes multiplications; otherwise the power of the absolute
        value is used.
        """
        a, number = self._arithmetic, self._arithmetic.constant
        known = a.known(exponent)
        if known is not None and known in (1, 2, 3, 4, -1, -2, -3, -4):
            made = base
            for _ in range(abs(int(known)) - 1):
                made = a.binary("mul", F32, made, base)
            return made if known > 0 else a.binary("div", F32, number(F32, 1.0), made)
        size, zero = self._glsl(Glsl.F_ABS, base), number(F32, 0.0)
        made = self._glsl(Glsl.POW, size, exponent)
        vast = a.compare("eq", F32, size, number(F32, math.inf))
        grows = a.compare("gt", F32, exponent, zero)
        made = a.select(F32, vast, a.select(F32, grows, size, zero), made)
        made = a.select(
            F32, a.compare("eq", F32, size, zero), a.select(F32, grows, zero, number(F32, math.inf)), made
        )
        made = a.select(F32, self._builder.pure(Opcode.IS_NAN, a.type_of(BOOL), base), base, made)
        half = a.binary("mul", F32, exponent, number(F32, 0.5))
        odd = a.compare("ne", F32, self._glsl(Glsl.FLOOR, half), half)
        whole = a.compare("eq", F32, self._glsl(Glsl.FLOOR, exponent), exponent)
        signed = a.select(F32, a.binary("and", BOOL, whole, odd), a.binary("sub", F32, zero, made), made)
        below = a.select(F32, a.binary("or", BOOL, whole, vast), signed, number(F32, math.nan))
        made = a.select(F32, a.compare("lt", F32, base, zero), below, made)
        return a.select(F32, a.compare("eq", F32, exponent, zero), number(F32, 1.0), made)

    def _round(self, value: int) -> int:
        """TVM's round, which rounds halves to even like its LLVM code (nearbyint)."""
        return self._glsl(Glsl.ROUND_EVEN, value)

    def _absolute(self, dtype: Dtype, value: int) -> int:
        if dtype.bits == 64:
            a = self._arithmetic
            zero = a.constant(dtype, 0)
            return a.select(
                dtype, a.compare("lt", dtype, value, zero), a.binary("sub", dtype, zero, value), value
            )
        made = self._builder.glsl(Glsl.S_ABS, self._arithmetic.type_of(dtype), value)
        return self._arithmetic.wrap(dtype, made)

    def _classify(self, name: str, dtype: Dtype, value: int) -> int:
        a, builder = self._arithmetic, self._builder
        if dtype.kind != "f":
            return a.constant(BOOL, name == "isfinite")
        value = self._conversions.cast(dtype, F32, value)
        nan = builder.pure(Opcode.IS_NAN, a.type_of(BOOL), value)
        if name == "isnan":
            return nan
        infinite = builder.pure(Opcode.IS_INF, a.type_of(BOOL), value)
        return infinite if name == "isinf" else a.negate_truth(a.binary("or", BOOL, nan, infinite))

    def _bits(self, name: str, dtype: Dtype, value: int) -> int:
        if dtype.kind not in "iu" or dtype.bits != 32:
            raise BuildError(f"{name} of {dtype} has no SPIR-V code: there is one for 32 bits")
        kind = self._arithmetic.type_of(U32)
        if name == "popcount":
            return self._builder.pure(Opcode.BIT_COUNT, kind, value)
        highest = self._builder.glsl(Glsl.FIND_U_MSB, kind, value)  # FindUMsb returns -1 for 0
        return self._arithmetic.binary("sub", I32, self._arithmetic.constant(I32, 31), highest)

    def _dot(self, a: int, b: int) -> int:
        for capability in (Capability.DOT_PRODUCT, Capability.DOT_PRODUCT_INPUT_4X8_PACKED):
            self._builder.capability(capability)
        return self._builder.pure(Opcode.S_DOT, self._arithmetic.type_of(I32), a, b, PACKED_4X8)

    # Subgroups. Lanes are threads in the order of threadIdx.x; float16 goes as float32, since subgroups need
    # not carry it.

    def _reduce(self, name: str, dtype: Dtype, value: int) -> int:
        if dtype.bits == 64 or dtype.kind == "b":
            raise BuildError(f"{name} of {dtype} has no SPIR-V code")
        wide = F32 if dtype.kind == "f" else dtype
        self._builder.capability(Capability.GROUP_NON_UNIFORM)
        self._builder.capability(Capability.GROUP_NON_UNIFORM_ARITHMETIC)
        value = self._conversions.cast(dtype, wide, value)
        op, scope = _REDUCE[name]["iuf".index(dtype.kind)], self._builder.u32(SCOPE_SUBGROUP)
        made = self._builder.value(op, self._arithmetic.type_of(wide), scope, GROUP_REDUCE, value)
        return self._conversions.cast(wide, dtype, self._arithmetic.wrap(dtype, made))

    def _shuffle(self, name: str, dtype: Dtype, values: list[int]) -> int:
        """A shuffle, with CUDA's operands (mask, value, lane or distance, width, warp size); a lane without a
        source keeps its value.
        """
        a, builder = self._arithmetic, self._builder
        width = a.known(values[3])
        if width is None or dtype.bits == 64 or dtype.kind == "b":
            raise BuildError(f"{name} of {dtype} with width {width} has no SPIR-V code")
        self.subgroup_size = max(self.subgroup_size, int(width))
        builder.capability(Capability.GROUP_NON_UNIFORM)
        builder.capability(Capability.GROUP_NON_UNIFORM_SHUFFLE)
        kind = a.type_of(U32)
        own = builder.pure(Opcode.LOAD, kind, builder.built_in(BuiltIn.SUBGROUP_LOCAL_INVOCATION_ID, kind))
        partner = self._partner(name, own, values[2], int(width))
        wide = F32 if dtype.kind == "f" else dtype
        value = self._conversions.cast(dtype, wide, values[1])
        made = builder.value(
            Opcode.GROUP_SHUFFLE, a.type_of(wide), builder.u32(SCOPE_SUBGROUP), value, partner
        )
        return self._conversions.cast(wide, dtype, made)

    def _partner(self, name: str, own: int, by: int, width: int) -> int:
        a = self._arithmetic
        last, extent = a.constant(I32, width - 1), a.constant(I32, width)
        place = a.binary("and", I32, own, last)
        if name == "tvm_warp_shuffle":
            return a.binary("add", I32, a.binary("sub", I32, own, place), a.binary("and", I32, by, last))
        if name == "tvm_warp_shuffle_xor":
            return a.binary("xor", I32, own, by)
        if name == "tvm_warp_shuffle_up":
            return a.select(I32, a.compare("ge", I32, place, by), a.binary("sub", I32, own, by), own)
        there = a.compare("lt", I32, a.binary("add", I32, place, by), extent)
        return a.select(I32, there, a.binary("add", I32, own, by), own)
