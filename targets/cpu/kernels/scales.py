"""Reads the scales and offsets of a packed matrix, whichever way they are stored (packing.Layout)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.half import widen
from nearfar.targets.cpu.units import Unit

Expr = Any
OfGroup = Callable[[Expr], tuple[Expr, Expr | None]]
"""Scales and offsets, float32, of a group of a span; no offsets where the scheme has none."""
Reading = Callable[[Expr], OfGroup]
"""What reads scales for a register of columns from one on."""
HALF_LINE = v.ROWS // 2
"""Words of half a line, which holds a float16 for each row of a block."""


class SpanScales:
    """The scales of the groups of a span, for n columns of a block from `first` on.

    Two groups share a line of scales, or a group has a line of scales and offsets; or groups have integers,
    which float16 factors of the span multiply.
    """

    def __init__(
        self, layout: packing.Layout, unit: Unit, w: Expr, block: Expr, span: Expr, first: Expr, n: int
    ) -> None:
        self._layout, self._unit, self._w, self._at = layout, unit, w, (block, span)
        self._first, self._n = first, n
        self._units = [self._half(i) for i in range(layout.matrix.scales.values)] if layout.levels else []

    @staticmethod
    def reader(layout: packing.Layout, unit: Unit, w: Expr, block: Expr, span: Expr) -> Reading:
        """What reads the scales of a span for a register of columns."""
        return lambda first: SpanScales(layout, unit, w, block, span, first, unit.lanes).of

    def of(self, group: Expr) -> tuple[Expr, Expr | None]:
        """See OfGroup."""
        scales = self._layout.matrix.scales
        if not self._units:
            return (self._half(0), self._half(1)) if scales.offsets else (self._half(group), None)
        scale = self._integer(group)
        if not scales.offsets:
            centred = v.cast(scale, f"int32x{self._n}") - v.isplat(scales.zero(scales.bits), n=self._n)
            return T.Bind(v.cast(centred, f"float32x{self._n}") * self._units[0]), None
        offset = self._integer(group + self._layout.groups)
        less = v.splat(0.0, self._n) - self._units[1]
        return self._times(scale, self._units[0]), self._times(offset, less)

    def _times(self, codes: Expr, factor: Expr) -> Expr:
        return T.Bind(v.cast(v.cast(codes, f"int32x{self._n}"), f"float32x{self._n}") * factor)

    def _half(self, which: Expr) -> Expr:
        """The float16 values of half of the span's last line, as float32."""
        at = which * HALF_LINE + self._first // 2
        words = v.lanes(self._w, [*self._at, self._layout.level_starts[-1], at], self._n // 2)
        return widen(self._unit, T.Bind(v.bits(words, f"float16x{self._n}")), self._n, finite=True)

    def _integer(self, value: Expr) -> Expr:
        """The integers at a number in the list of the span's scales and offsets, uint32."""
        found = None
        for plane, start in zip(self._layout.levels, self._layout.level_starts, strict=False):
            run = packing.WORD // plane.bits
            line = start + (value >> v.i32(run.bit_length() - 1))
            down = tirx.Cast("uint32", (value & v.i32(run - 1)) * v.i32(plane.bits))
            word = v.lanes(self._w, [*self._at, line, self._first], self._n)
            part = T.Bind((word >> v.splat(down, self._n)) & v.isplat(plane.mask, "uint32", self._n))
            if plane.low:
                part = T.Bind(part << v.isplat(plane.low, "uint32", self._n))
            found = part if found is None else T.Bind(found | part)
        return found


def unpacked(layout: packing.Layout, unit: Unit, w: Expr, block: Expr, span: Expr) -> Reading:
    """What reads the scales of a span that are unpacked now, for products that use them often."""
    values = layout.matrix.scales.values
    table = v.local((layout.groups, values, v.ROWS), "float32")
    packed = SpanScales(layout, unit, w, block, span, v.i32(0), v.ROWS)
    with T.serial(0, layout.groups) as group:
        for i, each in enumerate(packed.of(group)[:values]):
            v.put(table, [group, i, 0], each)

    def of(first: Expr) -> OfGroup:
        def read(group: Expr) -> tuple[Expr, Expr | None]:
            scale, *offset = (v.lanes(table, [group, i, first], unit.lanes) for i in range(values))
            return scale, offset[0] if offset else None

        return read

    return of
