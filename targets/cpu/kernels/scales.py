"""Reads the scales and offsets of a packed matrix, whichever way they are stored (packing.BlockLayout)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.half import widen
from nearfar.targets.cpu.packing import HALF_LINE, HALVES
from nearfar.targets.cpu.units import Unit

Expr = Any
OfGroup = Callable[[Expr], tuple[Expr, Expr | None]]
"""Gives float32 scales and offsets of a group of a span; no offsets where the scheme has none."""
BYTES_OF_WORD = 4


class SpanScales:
    """The scales of the groups of a span of a block.

    Two groups share a line of scales, or a group has a line of scales and offsets; or groups have integers,
    which float16 factors of the span multiply. Integers of fewer than 8 bits are unpacked into a table of
    bytes, for all groups and columns at once; a load then widens those of a group.
    """

    def __init__(self, layout: packing.BlockLayout, unit: Unit, w: Expr, block: Expr, span: Expr) -> None:
        self._layout, self._unit, self._w, self._at = layout, unit, w, (block, span)
        unpacked = any(plane.bits < packing.BYTE for plane in layout.levels)
        self._table = self._unpacked() if unpacked else None

    def columns(self, first: Expr, n: int) -> OfGroup:
        """The scales and offsets of n columns from `first` on."""
        scales = self._layout.matrix.scales
        if not self._layout.levels:
            if scales.offsets:
                return lambda group: (self._half(0, first, n), self._half(1, first, n))
            return lambda group: (self._half(group, first, n), None)
        factor = self._half(0, first, n)
        if not scales.offsets:
            return lambda group: (
                self._times(self._integers(group, first, n), scales.centre, factor, n),
                None,
            )
        less = T.Bind(v.splat(0.0, n) - self._half(1, first, n))

        def of(group: Expr) -> tuple[Expr, Expr | None]:
            offsets = self._integers(group + self._layout.groups, first, n)
            return self._times(self._integers(group, first, n), 0, factor, n), self._times(
                offsets, 0, less, n
            )

        return of

    def _times(self, integers: Expr, zero: int, factor: Expr, n: int) -> Expr:
        centred = T.Bind(integers - v.isplat(zero, n=n)) if zero else integers
        return T.Bind(v.cast(centred, f"float32x{n}") * factor)

    def _half(self, which: Expr, first: Expr, n: int) -> Expr:
        """The float16 values of a half line of a span's, as float32."""
        line, half = self._layout.scale_start, which
        if self._layout.levels:
            line, half = divmod(which + self._layout.level_starts[-1], HALVES)
        words = v.lanes(self._w, [*self._at, line, half * HALF_LINE + first // 2], n // 2)
        return widen(self._unit, T.Bind(v.bits(words, f"float16x{n}")), n, finite=True)

    def _integers(self, value: Expr, first: Expr, n: int) -> Expr:
        """The integers at a number in the list of the span's scales and offsets, int32."""
        words = n // BYTES_OF_WORD
        at = value * (v.ROWS // BYTES_OF_WORD) + first // BYTES_OF_WORD
        if self._table is not None:
            found = v.lanes(self._table, [at], words)
        else:
            line = at >> v.i32(v.ROWS.bit_length() - 1)
            found = v.lanes(self._w, [*self._at, line, at & v.i32(v.ROWS - 1)], words)
        return T.Bind(v.cast(v.bits(found, f"uint8x{n}"), f"int32x{n}"))

    def _unpacked(self) -> Expr:
        layout, dtype = self._layout, "uint32"
        runs = [layout.level_run(plane) for plane in layout.levels]
        n = min(runs) * HALF_LINE
        table = v.local((-(-layout.table_halves // min(runs)) * n,), dtype)
        for half in range(0, layout.table_halves, min(runs)):
            found = None
            for plane, start, run in zip(layout.levels, layout.level_starts, runs, strict=False):
                index, inside = divmod(half, run)
                of, down = divmod(index, packing.BYTE // plane.bits)
                line, second = divmod(start + of * run + inside, HALVES)
                word = v.lanes(self._w, [*self._at, line, second * HALF_LINE], n)
                shift, mask = down * plane.bits - plane.low, plane.mask << plane.low
                if shift:
                    to = v.isplat(abs(shift), dtype, n)
                    word = T.Bind(word >> to if shift > 0 else word << to)
                part = T.Bind(word & v.isplat(mask * 0x01010101, dtype, n))
                found = part if found is None else T.Bind(found | part)
            v.put(table, [half * HALF_LINE], found, n)
        return table
