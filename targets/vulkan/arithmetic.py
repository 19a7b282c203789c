"""Arithmetic of TIR's dtypes in SPIR-V.

Values are in register types: integers of 8 and 16 bits use 32, and `wrap` keeps them in range after each
operation, so that no module needs Int8 or Int16; signed integers use unsigned types, since the instructions
decide on the sign. Operations on integers known at build time are computed here.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nearfar.errors import BuildError

from .opcodes import Capability, Glsl, Opcode
from .spirv import Builder

Number = int | float | bool
WIDTH = 4  # numbers of a vector


@dataclass(frozen=True)
class Dtype:
    """A scalar dtype: `kind` is i, u, f or b (bool); `bits` as stored."""

    kind: str
    bits: int

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return max(self.bits // 8, 1)


I32, U32, F32, F16, BOOL = Dtype("i", 32), Dtype("u", 32), Dtype("f", 32), Dtype("f", 16), Dtype("b", 1)
_KINDS = {"int": "i", "uint": "u", "float": "f"}
_SUPPORTED = {"i": (8, 16, 32, 64), "u": (8, 16, 32, 64), "f": (16, 32)}


@lru_cache(maxsize=256)
def dtype_of(name: str) -> Dtype:
    """The dtype with TVM's name, lanes ignored; BuildError for others."""
    name = name.split("x")[0]
    if name == "bool":
        return BOOL
    stem = name.rstrip("0123456789")
    kind, digits = _KINDS.get(stem), name[len(stem) :]
    if kind is None or not digits or int(digits) not in _SUPPORTED[kind]:
        raise BuildError(
            f"dtype {name} has no SPIR-V code here (there are int, uint of 8 to 64 bits, float16/32, bool)"
        )
    return Dtype(kind, int(digits))


_FLOAT_OPS = {
    "add": Opcode.F_ADD,
    "sub": Opcode.F_SUB,
    "mul": Opcode.F_MUL,
    "div": Opcode.F_DIV,
    "mod": Opcode.F_REM,
    "floormod": Opcode.F_MOD,
}
_INT_OPS = {
    "add": Opcode.I_ADD, "sub": Opcode.I_SUB, "mul": Opcode.I_MUL, "and": Opcode.BITWISE_AND,
    "or": Opcode.BITWISE_OR, "xor": Opcode.BITWISE_XOR, "shl": Opcode.SHIFT_LEFT_LOGICAL,
}  # fmt: skip
_SHIFT_RIGHT = {"i": Opcode.SHIFT_RIGHT_ARITHMETIC, "u": Opcode.SHIFT_RIGHT_LOGICAL}
_COMPARE = {
    "eq": (Opcode.I_EQUAL, Opcode.I_EQUAL, Opcode.F_ORD_EQUAL),
    "ne": (Opcode.I_NOT_EQUAL, Opcode.I_NOT_EQUAL, Opcode.F_UNORD_NOT_EQUAL),
    "lt": (Opcode.S_LESS, Opcode.U_LESS, Opcode.F_ORD_LESS),
    "le": (Opcode.S_LESS_EQUAL, Opcode.U_LESS_EQUAL, Opcode.F_ORD_LESS_EQUAL),
    "gt": (Opcode.S_GREATER, Opcode.U_GREATER, Opcode.F_ORD_GREATER),
    "ge": (Opcode.S_GREATER_EQUAL, Opcode.U_GREATER_EQUAL, Opcode.F_ORD_GREATER_EQUAL),
}  # fmt: skip
_FOLD: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift, "min": min, "max": max,
}  # fmt: skip
_FOLD_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge,
}  # fmt: skip


class Arithmetic:
    """Operations on ids; `dtype` is the dtype of the operands."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self._known: dict[int, Number] = {}
        self._factors: dict[int, int] = {}
        self._sums: dict[int, tuple[int, int]] = {}
        self._parts: dict[int, tuple[int, int]] = {}

    def type_of(self, dtype: Dtype) -> int:
        """The register type."""
        if dtype.kind == "b":
            return self.builder.bool_type()
        if dtype.kind == "f":
            return self.builder.float_type(dtype.bits)
        return self.builder.int_type(max(dtype.bits, 32))

    def computes(self, dtype: Dtype) -> int:
        """The register type of an operation; float16 needs its capability except to convert, load
        and store.
        """
        if dtype == F16:
            self.builder.capability(Capability.FLOAT16)
        return self.type_of(dtype)

    def known(self, value: int) -> Number | None:
        """The value of an id, if it is known at build time; otherwise None."""
        return self._known.get(value)

    def constant(self, dtype: Dtype, number: Number) -> int:
        """A number of the dtype; integers wrap."""
        if dtype.kind == "b":
            made = self.builder.truth(bool(number))
        elif dtype.kind == "f":
            made = self.builder.constant(self.computes(dtype), _float_bits(dtype, float(number)))
        else:
            number = _wrapped(dtype, int(number))
            bits = max(dtype.bits, 32)
            words = [(number >> shift) & 0xFFFFFFFF for shift in range(0, bits, 32)]
            made = self.builder.constant(self.builder.int_type(bits), *words)
        if dtype.kind != "f":
            # One id serves all integer dtypes of its width, and the signed number is recorded, see `_taken`.
            number = (
                bool(number) if dtype.kind == "b" else _wrapped(Dtype("i", max(dtype.bits, 32)), int(number))
            )
        self._known[made] = number
        return made

    def factor(self, value: int) -> int:
        """A number that the integer is a multiple of (0: it is 0)."""
        known = self._known.get(value)
        return abs(int(known)) if known is not None else self._factors.get(value, 1)

    def split(self, value: int) -> tuple[int, int]:
        """Split an integer into an id and a known number to add; a known integer is 0 plus itself."""
        known = self._known.get(value)
        return (self.constant(I32, 0), int(known)) if known is not None else self._sums.get(value, (value, 0))

    def _learn(self, name: str, made: int, a: int, b: int) -> None:
        """Remember facts about a new 32-bit sum or product."""
        if name == "mul":
            self._factors[made] = self.factor(a) * self.factor(b)
        elif name == "shl" and b in self._known:
            self._factors[made] = self.factor(a) << int(self._known[b])
        elif name in ("add", "sub"):
            self._factors[made] = math.gcd(self.factor(a), self.factor(b))
            sign = 1 if name == "add" else -1
            if b in self._known:
                base, offset = self.split(a)
                self._sums[made] = base, offset + sign * int(self._known[b])
            elif a in self._known and name == "add":
                base, offset = self.split(b)
                self._sums[made] = base, offset + int(self._known[a])

    def _taken(self, dtype: Dtype, value: int) -> int | None:
        """A known integer as the dtype reads it."""
        number = self._known.get(value)
        return None if number is None or dtype.kind in "fb" else _wrapped(dtype, int(number))

    def wrap(self, dtype: Dtype, value: int) -> int:
        """Bring a register back into the range of 8 or 16 bits."""
        if dtype.bits >= 32 or dtype.kind not in "iu":
            return value
        builder, kind = self.builder, self.builder.int_type()
        if dtype.kind == "u":
            return builder.pure(Opcode.BITWISE_AND, kind, value, builder.u32((1 << dtype.bits) - 1))
        return builder.pure(Opcode.BIT_FIELD_S_EXTRACT, kind, value, builder.u32(0), builder.u32(dtype.bits))

    def binary(self, name: str, dtype: Dtype, a: int, b: int) -> int:
        """Compute add, sub, mul, div, mod (towards zero), floordiv, floormod, min, max, and, or, xor, shl or
        shr.
        """
        x, y = self._taken(dtype, a), self._taken(dtype, b)
        if (
            x is not None
            and y is not None
            and name in _FOLD
            and not (name in ("shl", "shr") and not 0 <= y < dtype.bits)
        ):
            return self.constant(dtype, _FOLD[name](x, y))
        if dtype.kind == "b":
            return self._logical(name, a, b)
        if name in ("min", "max"):
            return self._extreme(name, dtype, a, b)
        if dtype.kind == "f":
            return self._float(name, dtype, a, b)
        if name in ("div", "mod", "floordiv", "floormod"):
            return self._divide(name, dtype, a, b)
        if (name in ("add", "sub", "or", "xor", "shl", "shr") and y == 0) or (name == "mul" and y == 1):
            return a
        if name == "add" and dtype.bits == 32 and x is None and y is None:
            (base, offset), (other, more) = self.split(a), self.split(b)
            # (i + 1) + (j + 2) is computed as (i + j) + 3, so that sums which differ by a constant are
            # recognized
            if offset or more:
                return self.binary(
                    "add", dtype, self.binary("add", dtype, base, other), self.constant(dtype, offset + more)
                )
        op = _SHIFT_RIGHT[dtype.kind] if name == "shr" else _INT_OPS[name]
        made = self.builder.pure(op, self.type_of(dtype), a, b)
        if dtype.bits == 32:
            self._learn(name, made, a, b)
        return self.wrap(dtype, made)

    # Operations on vectors: of float16, of which GPUs compute two at once if an instruction names both.

    def part(self, vector: int, element: int, place: int) -> int:
        """One number of a vector; `element` is their type."""
        made = self.builder.pure(Opcode.COMPOSITE_EXTRACT, element, vector, place)
        self._parts[made] = vector, place
        return made

    def gathered(self, element: int, values: Sequence[int]) -> int:
        """A vector of numbers; if they all come from one vector, in order, that vector."""
        found = [self._parts.get(value, (0, 0)) for value in values]
        vector = found[0][0]
        if vector and found == [(vector, place) for place in range(WIDTH)]:
            return vector
        kind = self.builder.vector_type(element, len(values))
        return self.builder.pure(Opcode.COMPOSITE_CONSTRUCT, kind, *values)

    def vector(self, name: str, operands: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Compute add, sub, mul or fma (a·b + c) for vectors of float16."""
        element = self.computes(F16)
        kind = self.builder.vector_type(element, WIDTH)
        vectors = [self.gathered(element, values) for values in operands]
        if name == "fma":
            made = self.builder.glsl(Glsl.FMA, kind, *vectors)
        else:
            made = self.builder.pure(_FLOAT_OPS[name], kind, *vectors)
        return tuple(self.part(made, element, place) for place in range(WIDTH))

    def _logical(self, name: str, a: int, b: int) -> int:
        op = {"and": Opcode.LOGICAL_AND, "or": Opcode.LOGICAL_OR, "xor": Opcode.LOGICAL_NOT_EQUAL}.get(name)
        if op is None:
            raise BuildError(f"{name} of bool has no SPIR-V code")
        for one, other in ((a, b), (b, a)):
            known = self._known.get(one)
            if known is not None and name in ("and", "or"):
                return other if bool(known) == (name == "and") else one
        return self.builder.pure(op, self.builder.bool_type(), a, b)

    def _extreme(self, name: str, dtype: Dtype, a: int, b: int) -> int:
        """The smaller or larger of two values. Floats follow TVM's LLVM code, `a < b ? a : b`: with a NaN the
        result is b.
        """
        if dtype.kind == "f" or dtype.bits == 64:
            return self.select(dtype, self.compare("lt" if name == "min" else "gt", dtype, a, b), a, b)
        which = {"imin": Glsl.S_MIN, "imax": Glsl.S_MAX, "umin": Glsl.U_MIN, "umax": Glsl.U_MAX}[
            dtype.kind + name
        ]
        made = self.builder.glsl(which, self.type_of(dtype), a, b)
        self._factors[made] = math.gcd(self.factor(a), self.factor(b))
        return made

    def _float(self, name: str, dtype: Dtype, a: int, b: int) -> int:
        kind = self.computes(dtype)
        if name == "floordiv":
            return self.builder.glsl(Glsl.FLOOR, kind, self.builder.pure(Opcode.F_DIV, kind, a, b))
        if name not in _FLOAT_OPS:
            raise BuildError(f"{name} of {dtype} has no SPIR-V code")
        return self.builder.pure(_FLOAT_OPS[name], kind, a, b)

    def _divide(self, name: str, dtype: Dtype, a: int, b: int) -> int:
        """Quotients, and remainders from the quotient: Vulkan leaves OpSRem and OpSMod of negative numbers
        undefined.
        """
        builder, kind = self.builder, self.type_of(dtype)
        x, y = self._taken(dtype, a), self._taken(dtype, b)
        if x is not None and y:
            quotient = (
                x // y if name.startswith("floor") else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            )
            return self.constant(dtype, quotient if name.endswith("div") else x - quotient * y)
        if dtype.kind == "u":
            return builder.pure(Opcode.U_DIV if name.endswith("div") else Opcode.U_MOD, kind, a, b)
        if name == "floormod" and y is not None and y > 0 and y & (y - 1) == 0:
            return builder.pure(Opcode.BITWISE_AND, kind, a, self.constant(dtype, y - 1))
        if name == "floordiv" and y is not None and y > 0 and y & (y - 1) == 0:
            return self.binary("shr", dtype, a, self.constant(dtype, y.bit_length() - 1))
        wide = Dtype("i", max(dtype.bits, 32))
        quotient = builder.pure(Opcode.S_DIV, kind, a, b)
        if name == "div":
            return self.wrap(dtype, quotient)
        rest = self.binary("sub", wide, a, self.binary("mul", wide, quotient, b))
        if name == "mod":
            return rest
        zero = self.constant(wide, 0)
        signs_differ = self.compare("lt", wide, self.binary("xor", wide, rest, b), zero)
        adjust = self.binary("and", BOOL, self.compare("ne", wide, rest, zero), signs_differ)
        if name == "floormod":
            return self.select(wide, adjust, self.binary("add", wide, rest, b), rest)
        lower = self.binary("sub", wide, quotient, self.constant(wide, 1))
        return self.wrap(dtype, self.select(wide, adjust, lower, quotient))

    def compare(self, name: str, dtype: Dtype, a: int, b: int) -> int:
        """Compare with eq, ne, lt, le, gt or ge; NaN is not equal to anything, and no order holds for it."""
        x, y = self._taken(dtype, a), self._taken(dtype, b)
        if x is not None and y is not None:
            return self.constant(BOOL, _FOLD_COMPARE[name](x, y))
        if dtype.kind == "b":
            op = {"eq": Opcode.LOGICAL_EQUAL, "ne": Opcode.LOGICAL_NOT_EQUAL}.get(name)
            if op is None:
                raise BuildError(f"{name} of bool has no SPIR-V code")
            return self.builder.pure(op, self.builder.bool_type(), a, b)
        self.computes(dtype)
        return self.builder.pure(_COMPARE[name]["iuf".index(dtype.kind)], self.builder.bool_type(), a, b)

    def negate_truth(self, a: int) -> int:
        """Logical not."""
        known = self._known.get(a)
        if known is not None:
            return self.constant(BOOL, not known)
        return self.builder.pure(Opcode.LOGICAL_NOT, self.builder.bool_type(), a)

    def invert(self, dtype: Dtype, a: int) -> int:
        """Bitwise not."""
        return self.wrap(dtype, self.builder.pure(Opcode.NOT, self.type_of(dtype), a))

    def select(self, dtype: Dtype, condition: int, a: int, b: int) -> int:
        """`a` where the condition holds, else `b`; both are computed."""
        known = self._known.get(condition)
        if known is not None or a == b:
            return a if known or a == b else b
        return self.builder.pure(Opcode.SELECT, self.computes(dtype), condition, a, b)


def _float_bits(dtype: Dtype, number: float) -> int:
    """The bits of a float; a number above the largest finite one becomes infinity."""
    store, read = ("<e", "<H") if dtype.bits == 16 else ("<f", "<I")
    try:
        data = struct.pack(store, number)
    except OverflowError:
        data = struct.pack(store, float("inf") if number > 0 else float("-inf"))
    return int(struct.unpack(read, data)[0])


def _wrapped(dtype: Dtype, number: int) -> int:
    number &= (1 << dtype.bits) - 1
    return number - (1 << dtype.bits) if dtype.kind == "i" and number >> (dtype.bits - 1) else number
