"""Cooperative matrices: tiles that the lanes of a subgroup hold and multiply together.

Kernels call functions by name (call_extern), as statements, with whole tiles of `size` by `size` in workgroup
memory, whose rows are `stride` elements of the buffer apart:
- `cooperative_clear(sum, size)` sets sum number `sum` of the subgroup, float32, to zero;
- `cooperative_add(sum, a, a_stride, b, b_stride, size)` adds the product of two tiles of float16 to it;
- `cooperative_store(sum, to, stride, size)` writes it.
All lanes of a subgroup must make each call together.

The extension requires Vulkan's memory model, in which workgroup memory is private to a thread unless every
access to it, and every barrier, says otherwise: see BufferPlaces and Walker.
"""

from __future__ import annotations

from typing import Any

from nearfar.errors import BuildError

from .arithmetic import F16, F32, Arithmetic
from .opcodes import NON_PRIVATE, SCOPE_SUBGROUP, Capability, Opcode
from .places import BufferPlaces

USE_A, USE_B, USE_SUM = 0, 1, 2
ROW_MAJOR = 0
PREFIX = "cooperative_"


class Cooperative:
    """Writes the cooperative-matrix calls of a function."""

    def __init__(self, arithmetic: Arithmetic, memory: BufferPlaces) -> None:
        self._arithmetic, self._memory, self._builder = arithmetic, memory, arithmetic.builder
        self._sums: dict[int, int] = {}

    def call(self, name: str, numbers: list[int], pointers: list[int]) -> None:
        """Write a call, given its integers and its pointers, each in order."""
        size = numbers[-1]
        match name.removeprefix(PREFIX), numbers, pointers:
            case "clear", [number, _], []:
                zero = self._arithmetic.constant(F32, 0.0)
                kind = self._type(USE_SUM, size)
                self._builder.emit(Opcode.STORE, self._sum(number, size), self._builder.all_of(kind, zero))
            case "add", [number, a_stride, b_stride, _], [a, b]:
                self._add(self._sum(number, size), (a, a_stride), (b, b_stride), size)
            case "store", [number, stride, _], [to]:
                value = self._builder.value(Opcode.LOAD, self._type(USE_SUM, size), self._sum(number, size))
                u32 = self._builder.u32
                self._builder.emit(
                    Opcode.COOPERATIVE_STORE, to, value, u32(ROW_MAJOR), u32(stride), NON_PRIVATE
                )
                self._memory.disturb()
            case _:
                raise BuildError(f"{name} of {numbers} and {len(pointers)} pointers has no SPIR-V code")

    def _add(self, sum_: int, a: tuple[int, int], b: tuple[int, int], size: int) -> None:
        builder, kind = self._builder, self._type(USE_SUM, size)
        tiles = [self._loaded(use, size, *place) for use, place in ((USE_A, a), (USE_B, b))]
        added = builder.value(
            Opcode.COOPERATIVE_MUL_ADD, kind, *tiles, builder.value(Opcode.LOAD, kind, sum_)
        )
        builder.emit(Opcode.STORE, sum_, added)

    def _loaded(self, use: int, size: int, pointer: int, stride: int) -> int:
        u32 = self._builder.u32
        where = pointer, u32(ROW_MAJOR), u32(stride), NON_PRIVATE
        return self._builder.value(Opcode.COOPERATIVE_LOAD, self._type(use, size), *where)

    def _sum(self, number: int, size: int) -> int:
        if number not in self._sums:
            self._sums[number] = self._builder.local_variable(self._type(USE_SUM, size))
        return self._sums[number]

    def _type(self, use: int, size: int) -> int:
        builder = self._builder
        builder.capability(Capability.COOPERATIVE_MATRIX)
        element = self._arithmetic.computes(F32 if use == USE_SUM else F16)
        u32 = builder.u32
        return builder.declare(
            Opcode.TYPE_COOPERATIVE_MATRIX, element, u32(SCOPE_SUBGROUP), u32(size), u32(size), u32(use)
        )


def cooperates(nodes: Any) -> bool:
    """Whether a function, given as its nodes, calls these functions."""
    return any(str(getattr(node, "value", "")).startswith(PREFIX) for node in nodes)
