"""Matmul over quantized weights of 2 to 8 bits: out = epilogue(x' · Wᵀ), in one launch.

Activations are quantized to 16 bits by groups in the same launch and multiplied as integers (dot.py). The
usual 8 bits do not suffice: the greedy text must be that of float32 on the dequantized weights, and 8 bits
change logits by percents. 16 bits cost little more. At one row memory is the limit; with many rows there are
twice as many products of bytes, or two vpmaddwd in place of a vpmaddubsw, a vpmaddwd with ones, and the
handling of signs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Linear
from nearfar.kernels.pieces import MatrixPiece, placed
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import linear_panels, linear_tiles
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import SUMS, DotSums, products, tile
from nearfar.targets.cpu.kernels.epilogue import finish_tile, out_args, params
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.rounded import Rounded, Rounding
from nearfar.targets.cpu.kernels.rows import values_of, x_args
from nearfar.targets.cpu.units import Unit

Expr = Any


def linear(job: Linear, unit: Unit) -> Staged:
    """The launch of a matmul: the rows of x are rounded, then a parallel loop computes blocks of 16 outputs;
    one loop for each piece of the matrix.

    The head of a step of a prompt has MAX_ROWS rows, of which one alone is wanted: then `logit_rows` names
    that row again and again. It is computed once, and its outputs are copied.
    """
    ways = [_Way.of(job, unit, job.m, 0)]
    if job.rows and job.m == MAX_ROWS:
        ways.append(_Way.of(job, unit, 1, len(ways[0].scratch())))
    scratch = [each for way in ways for each in way.scratch()]
    parts = [part for piece in placed(job.matrix) for part in packing.parts(piece.matrix)]
    job = opened(job)
    ways = [way.opened(job) for way in ways]
    s_args = [
        (f"scratch:{i}", shape, dtype)
        for i, (shape, dtype) in enumerate(each for way in ways for each in way.scratch())
    ]
    w_args = [(f"w{i}", part.shape, part.dtype) for i, part in enumerate(parts)]
    args = [*x_args(job), *w_args, *out_args(job)]
    args[-1:-1] = s_args  # the output stays last

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        if len(ways) == 1:
            return ways[0].compute(unit, buf)
        with T.If(_one_row(buf["logit_rows"])):
            with T.Then():
                ways[1].compute(unit, buf)
            with T.Else():
                ways[0].compute(unit, buf)
        return None

    func = v.prim_func(
        "linear", [(name.replace(":", "_"), shape, dtype) for name, shape, dtype in args], body
    )
    return Staged((Stage(func, params(args)),), tuple(scratch))


def _one_row(logit_rows: Expr) -> Expr:
    """Whether all places name one row."""
    other = v.scalar("int32")
    v.put1(other, [0], v.i32(0))
    for i in range(1, MAX_ROWS):
        v.put1(other, [0], other[0] | (logit_rows[0] ^ logit_rows[i]))
    return other[0] == 0


@dataclass(frozen=True)
class _Way:
    """How `rows` rows are multiplied: the products by each piece of the matrix, and the roundings that they
    read, whose scratch begins with number `first`.
    """

    job: Linear
    rows: Expr
    pieces: tuple[tuple[MatrixPiece, DotSums], ...]
    roundings: tuple[Rounding, ...]
    first: int
    in_panels: bool

    @staticmethod
    def of(job: Linear, unit: Unit, rows: int, first: int) -> _Way:
        """The way that suits a number of rows."""
        panel = linear_panels.tile_of(unit, rows)
        shape = panel or tile(unit, rows, SUMS[unit.dot])
        pieces = tuple((piece, products(unit, piece.matrix, *shape)) for piece in placed(job.matrix))
        roundings = Rounding.of([dot for _, dot in pieces])
        return _Way(job, rows, pieces, tuple(roundings), first, panel is not None)

    def opened(self, job: Linear) -> _Way:
        """A copy of the way for a job with a symbolic number of rows."""
        return replace(self, job=job, rows=job.m if self.rows == self.job.m else self.rows)

    def scratch(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the rounded rows."""
        return [each for rounding in self.roundings for each in rounding.scratch(self.rows)]

    def compute(self, unit: Unit, buf: dict[str, Expr]) -> None:
        """Round the rows, and multiply them by all pieces."""
        rounded = {}
        for i, rounding in enumerate(self.roundings):
            at = self.first + 2 * i
            held = rounding.inputs(buf[f"scratch:{at}"], buf[f"scratch:{at + 1}"])
            rounded[rounding.dot.matrix.group] = held
        together = self.pieces[0][1].rows if self.in_panels else 1
        with v.rows(self.rows // together) as m:
            values = [values_of(self.job, buf, m * together + row) for row in range(together)]
            for rounding in self.roundings:
                x = rounded[rounding.dot.matrix.group]
                if self.in_panels:
                    rounding.write_tile(values, m, x.words, x.numbers)
                else:
                    rounding.write(values[0], m, x.words, x.numbers)
        for i, (piece, dot) in enumerate(self.pieces):
            of_piece = replace(self.job, matrix=piece.matrix, first=piece.first, of=self.job.matrix.n)
            job = of_piece if self.job.matrix.pieces else self.job
            compute = linear_panels.panels if self.in_panels else self._tiles
            compute(job, unit, dot, rounded[dot.matrix.group], buf | {"w": buf[f"w{i}"]})

    def _tiles(self, job: Linear, unit: Unit, dot: DotSums, x: Rounded, buf: dict[str, Expr]) -> None:
        count = packing.blocks(job.columns)
        with v.parallel(count) as block, T.serial(0, self.rows // dot.rows) as t:
            acc = v.local((dot.rows, v.ROWS), "float32")
            linear_tiles.accumulate(job.matrix, unit, dot, x, buf["w"], block, t, acc)
            up = None
            if job.gate is not None:
                up = v.local((dot.rows, v.ROWS), "float32")
                linear_tiles.accumulate(job.matrix, unit, dot, x, buf["w"], block + count, t, up)
            if self._copied:
                with T.serial(0, job.m) as row:
                    finish_tile(job, buf, block, row, 1, acc, up)
            else:
                finish_tile(job, buf, block, t * dot.rows, dot.rows, acc, up)

    @property
    def _copied(self) -> bool:
        """Whether all rows of the output are those of one row."""
        return bool(self.job.rows and self.job.m == MAX_ROWS and self.rows == 1)
