"""Looks codes up in a table of 16 integers of 8 bits (format.scales.TABLES), as a matrix's scheme says.

Every vector unit has an instruction that looks up a register of bytes in 16 bytes of another.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.scales import TABLES, VALUE_BITS, Table
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.units import Unit

Expr = Any
ZERO = 1 << (VALUE_BITS - 1)
"""The number that is added to values, so that they are uint8."""
WORD_BYTES = 4
LOOKUPS = {
    ("x86_64", 16): "llvm.x86.avx512.pshuf.b.512", ("x86_64", 8): "llvm.x86.avx2.pshuf.b",
    ("aarch64", 4): "llvm.aarch64.neon.tbl1.v16i8", ("wasm32", 4): "llvm.wasm.swizzle",
}  # fmt: skip
"""The instruction that looks bytes up, by architecture and words of a register. That of x86 looks each run of
16 bytes up in 16 bytes at the same place.
"""


def looked_up(unit: Unit, table: Table, codes: Expr, *, signed: bool) -> Expr:
    """The values of a register of words with a code below 16 in each byte: int8, or uint8 of the values plus
    ZERO.
    """
    values = [(value if signed else value + ZERO) & 0xFF for value in TABLES[table]]
    words = [
        int.from_bytes(bytes(values[at : at + WORD_BYTES]), "little", signed=True)
        for at in range(0, len(values), WORD_BYTES)
    ]
    run = T.Bind(tirx.Shuffle([v.i32(word) for word in words], list(range(len(words)))))
    runs = unit.lanes // len(words)
    whole = T.Bind(tirx.Shuffle([run] * runs, list(range(unit.lanes)))) if runs > 1 else run
    dtype, name = f"int8x{WORD_BYTES * unit.lanes}", LOOKUPS[unit.architecture, unit.lanes]
    found = v.intrin(dtype, name, *(T.Bind(v.bits(each, dtype)) for each in (whole, codes)))
    return T.Bind(v.bits(found, f"int32x{unit.lanes}"))


def value_of(table: Table, code: Expr) -> Expr:
    """The value of one code (uint32, below 16), int32."""
    half = len(TABLES[table]) // 2
    low, high = (
        int.from_bytes(bytes(value + ZERO for value in part), "little", signed=True)
        for part in (TABLES[table][:half], TABLES[table][half:])
    )
    place = tirx.Cast("int64", code & tirx.IntImm("uint32", half - 1)) * _i64(VALUE_BITS)
    word = tirx.Select(code < tirx.IntImm("uint32", half), _i64(low), _i64(high))
    return tirx.Cast("int32", (word >> place) & _i64((1 << VALUE_BITS) - 1)) - v.i32(ZERO)


def _i64(value: int) -> Expr:
    return tirx.IntImm("int64", value)
