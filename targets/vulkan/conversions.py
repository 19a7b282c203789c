"""Casts and reinterpretations between TIR's dtypes."""

from __future__ import annotations

import struct

from nearfar.errors import BuildError

from .arithmetic import F16, F32, U32, Arithmetic, Dtype, Number
from .opcodes import Glsl, Opcode


class Conversions:
    """Converts between dtypes; Arithmetic explains how registers hold values."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic, self._builder = arithmetic, arithmetic.builder

    def cast(self, source: Dtype, to: Dtype, value: int) -> int:
        """Convert a value to another dtype.

        Integers wrap; a float that an integer cannot hold saturates, and NaN becomes 0, as in WGSL.
        """
        arithmetic = self._arithmetic
        if source == to:
            return value
        if source.kind == "b":
            return arithmetic.select(to, value, arithmetic.constant(to, 1), arithmetic.constant(to, 0))
        if to.kind == "b":
            return arithmetic.compare("ne", source, value, arithmetic.constant(source, 0))
        known = arithmetic.known(value)
        if known is not None and source.kind != "f":
            return arithmetic.constant(to, _read(source, known))
        if source.kind == "f":
            return self._of_float(source, to, value)
        if to.kind == "f":
            op = Opcode.CONVERT_S_TO_F if source.kind == "i" else Opcode.CONVERT_U_TO_F
            return self.cast(F32, to, self._builder.pure(op, arithmetic.type_of(F32), value))
        return self._of_integer(source, to, value)

    def _of_integer(self, source: Dtype, to: Dtype, value: int) -> int:
        held, wanted = max(source.bits, 32), max(to.bits, 32)
        if held != wanted:
            op = Opcode.S_CONVERT if source.kind == "i" and wanted > held else Opcode.U_CONVERT
            value = self._builder.pure(op, self._builder.int_type(wanted), value)
        fits = source.bits < to.bits and (source.kind == "u" or to.kind == "i")
        return value if fits else self._arithmetic.wrap(to, value)

    def _of_float(self, source: Dtype, to: Dtype, value: int) -> int:
        arithmetic, builder = self._arithmetic, self._builder
        if to.kind == "f":
            return builder.pure(Opcode.F_CONVERT, arithmetic.type_of(to), value)
        value = self.cast(source, F32, value)
        low, high = (-(1 << (to.bits - 1)), 1 << (to.bits - 1)) if to.kind == "i" else (0, 1 << to.bits)
        op = Opcode.CONVERT_F_TO_S if to.kind == "i" else Opcode.CONVERT_F_TO_U
        # The conversion of numbers out of range is undefined, so limits are selected after it. A number above
        # `low` is not NaN.
        made = builder.pure(op, arithmetic.type_of(to), value)
        below = arithmetic.compare("gt", F32, value, arithmetic.constant(F32, low))
        above = arithmetic.compare("ge", F32, value, arithmetic.constant(F32, high))
        made = arithmetic.select(to, below, made, arithmetic.constant(to, low))
        made = arithmetic.select(to, above, arithmetic.constant(to, high - 1), made)
        if to.kind == "i":
            nan = builder.pure(Opcode.IS_NAN, builder.bool_type(), value)
            made = arithmetic.select(to, nan, arithmetic.constant(to, 0), made)
        return made

    def reinterpret(self, source: Dtype, to: Dtype, value: int) -> int:
        """The bits of `value` as another dtype of the same width."""
        if source.bits != to.bits or "b" in (source.kind, to.kind):
            raise BuildError(f"reinterpret from {source} to {to} has no SPIR-V code")
        if source.kind == to.kind:
            return value
        arithmetic, builder = self._arithmetic, self._builder
        known = arithmetic.known(value)
        if known is not None and source.kind != "f" and to == F32:
            number = struct.unpack("<f", struct.pack("<I", int(known) & 0xFFFFFFFF))[0]
            if number == number:  # a NaN's bits would not survive Python's float
                return arithmetic.constant(F32, number)
        if to == F16:
            return self.cast(F32, F16, self.half(value, 0))
        if source == F16:
            bits = self.packed(self.cast(F16, F32, value))
            return self.cast(Dtype("u", 16), to, bits)
        if "f" in (source.kind, to.kind):
            return builder.pure(Opcode.BITCAST, arithmetic.type_of(to), value)
        return arithmetic.wrap(to, value)

    def half(self, word: int, which: int) -> int:
        """The float16 in the low (0) or high (1) half of a word, as float32. Needs no float16 feature."""
        builder, kind = self._builder, self._arithmetic.type_of(F32)
        pair = builder.glsl(Glsl.UNPACK_HALF_2X16, builder.vector_type(kind, 2), word)
        return builder.pure(Opcode.COMPOSITE_EXTRACT, kind, pair, which)

    def half_of(self, word: int, which: int) -> int:
        """One float16 half of a word."""
        builder, kind = self._builder, self._arithmetic.computes(F16)
        pair = builder.pure(Opcode.BITCAST, builder.vector_type(kind, 2), word)
        return builder.pure(Opcode.COMPOSITE_EXTRACT, kind, pair, which)

    def packed(self, value: int) -> int:
        """The float16 bits of a float32, as uint16."""
        builder, kind = self._builder, self._arithmetic.type_of(F32)
        zero = self._arithmetic.constant(F32, 0.0)
        pair = builder.pure(Opcode.COMPOSITE_CONSTRUCT, builder.vector_type(kind, 2), value, zero)
        return builder.glsl(Glsl.PACK_HALF_2X16, self._arithmetic.type_of(U32), pair)


def _read(source: Dtype, known: Number) -> int:
    """A known integer as its dtype reads it (Arithmetic keeps the signed number)."""
    return int(known) & ((1 << source.bits) - 1) if source.kind == "u" else int(known)
