"""Looks up rows of the embedding matrix, which is packed like every other (it may be the lm_head as well)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Embed
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import lines, turn
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.scales import SpanScales
from nearfar.targets.cpu.kernels.tables import value_of
from nearfar.targets.cpu.units import Unit

Expr = Any


def embed(job: Embed, unit: Unit) -> Staged:
    """The launches of an Embed job."""
    job, matrix = opened(job), job.matrix
    w_args = [(f"w{i}", part.shape, part.dtype) for i, part in enumerate(packing.parts(matrix))]
    args = [("tokens", (MAX_STEP,), "int32"), *w_args, ("out", *job.out)]

    def body(tokens: Expr, *rest: Expr) -> None:
        weights, out = rest[:-1], rest[-1]

        def put(row: Expr, k: Expr, value: Expr) -> None:
            v.put1(out, [row, k], value if job.scale == 1.0 else value * v.f32(job.scale))

        with v.rows(job.m) as row:
            token = T.Bind(tirx.max(tirx.min(tokens[row], matrix.n - 1), 0))
            block, lane = T.Bind(token // v.ROWS), T.Bind(token % v.ROWS)
            if matrix.quantized:
                layout, put_one = packing.BlockLayout(matrix), functools.partial(put, row)
                _Row(layout, unit, weights[0], block, lane, put_one).whole()
            else:
                with T.serial(0, matrix.k) as k:
                    put(row, k, tirx.Cast("float32", weights[0][block, k, lane]))

    func = v.prim_func("embed", args, body)
    return Staged((Stage(func, tuple(name for name, *_ in args)),))


@dataclass(frozen=True)
class _Row:
    """Row `lane` of a block: calls put(k, value) for each number."""

    layout: packing.BlockLayout
    unit: Unit
    w: Expr
    block: Expr
    lane: Expr
    put: Callable[[Expr, Expr], None]

    def whole(self) -> None:
        """Unpack the row, span by span."""
        each, cells = self.layout.span // self.layout.cell, self.layout.matrix.k // self.layout.cell
        with T.serial(0, cells // each) as span:
            self._span(span, each)
        if cells % each:
            self._span(v.i32(cells // each), cells % each)

    def _span(self, span: Expr, cells: int) -> None:
        scales = SpanScales(self.layout, self.unit, self.w, self.block, span).columns(v.i32(0), v.ROWS)
        of_cell = self.layout.cell // self.layout.matrix.group
        with T.serial(0, cells) as cell:
            for inside in range(of_cell):
                in_span = T.Bind(cell * of_cell + inside)
                both = v.local((2, v.ROWS), "float32")
                for half, values in enumerate(scales(in_span)):
                    if values is not None:
                        v.put(both, [half, 0], values)
                self._group(span, cell, inside, in_span, both)

    def _group(self, span: Expr, cell: Expr, inside: int, in_span: Expr, both: Expr) -> None:
        """Unpack a group of a cell. Without offsets the only rounding is that of scale · (code − zero)."""
        matrix, step = self.layout.matrix, turn(self.layout.matrix)
        scale, first = T.Bind(both[0, self.lane]), inside * (matrix.group // packing.QUAD)
        offset = T.Bind(both[1, self.lane]) if matrix.scales.offsets else None
        of_span = T.Bind(span * self.layout.span + in_span * matrix.group)
        with T.serial(0, matrix.group // step) as c:
            for i in range(step):
                code, table = self._code(span, cell, inside, first, c, i), matrix.scales.table
                number = value_of(table, code) if table else tirx.Cast("int32", code) - v.i32(matrix.zero)
                value = tirx.Cast("float32", number) * scale
                self.put(of_span + c * step + i, value if offset is None else value + offset)

    def _code(self, span: Expr, cell: Expr, inside: int, first: int, c: Expr, i: int) -> Expr:
        """Code i of turn c, uint32."""
        code = tirx.IntImm("uint32", 0)
        found = lines(self.layout, cell, inside, c)
        for plane, (line, _) in zip(self.layout.planes, found, strict=True):
            of_word = packing.QUAD * plane.quads
            place = first % plane.quads * packing.QUAD + i
            word = self.w[self.block, span, line + place // of_word, self.lane]
            part = (word >> _u32(plane.place(place % of_word))) & _u32(plane.mask)
            code = code | (part << _u32(plane.low))
        return code


def _u32(value: int) -> Expr:
    return tirx.IntImm("uint32", value)
