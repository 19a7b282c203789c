"""The products of a group of inputs: exact sums of integers, then scale·(Σ q x) + offset·(Σ x) in float32."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import DotSums, Words, lines
from nearfar.targets.cpu.kernels.rounded import Rounded
from nearfar.targets.cpu.packing import BlockLayout
from nearfar.targets.cpu.units import Unit

Expr = Any


def begun(dot: DotSums, x: Rounded, t: Expr, g: Expr) -> Expr:
    """The registers for the sums of a group, before its products."""
    starts = [x.correction(dot.correction, t, g, row) for row in range(dot.rows)] if dot.begins else None
    return dot.zero(starts)


def ended(
    dot: DotSums,
    unit: Unit,
    x: Rounded,
    t: Expr,
    g: Expr,
    sums: Expr,
    columns: list[tuple[Expr, Expr, Expr | None]],
    acc: Expr,
) -> None:
    """Add the sums of group g to acc[row, column]; `columns`: the first column of each register, its scales
    and its offsets.
    """
    n = unit.lanes
    for piece, (first, scale, offset) in enumerate(columns):
        for r in range(dot.rows):
            total = dot.total(sums, r, piece)
            if dot.correction and not dot.begins:
                total = T.Bind(total + v.splat(x.correction(dot.correction, t, g, r), n))
            scaled = T.Bind(scale * v.splat(x.scale(t, g, r), n))
            value = v.lanes(acc, [r, first], n) + v.cast(total, f"float32x{n}") * scaled
            if offset is not None:
                value = T.Bind(value) + offset * v.splat(x.sum(t, g, r), n)
            v.put(acc, [r, first], value, n)


def words(
    layout: BlockLayout,
    unit: Unit,
    w: Expr,
    at: tuple[Expr, Expr],
    cell: Expr,
    inside: int,
    c: Expr,
    first: Expr,
) -> Words:
    """The words of each plane that hold turn c of group `inside` of a cell, for the columns from `first` on.

    `at`: the block and the span.
    """
    n = unit.lanes
    return [
        [T.Bind(v.bits(v.lanes(w, [*at, line + i, first], n), f"int32x{n}")) for i in range(count)]
        for line, count in lines(layout, cell, inside, c)
    ]
