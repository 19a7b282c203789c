"""The gated MLPs of the experts that the rows have chosen, in one launch.

A pair is a row with one of its experts. Pairs are sorted by expert into tiles of a few slots, so that a block
of weights is read once for all rows of its expert: with one row only the chosen experts are read, with many
each expert is read once. Threads share the blocks of 16 outputs; each goes through all tiles, so that the
work is equal whatever the rows choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import SHARED_FROM, Stage, Staged
from nearfar.kernels.jobs import Experts
from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import linear_dense, linear_tiles
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.activations import ACTIVATIONS
from nearfar.targets.cpu.kernels.dot import SUMS, DotSums, products, tile
from nearfar.targets.cpu.kernels.rounded import Rounding
from nearfar.targets.cpu.units import Unit

Expr = Any
Buffers = dict[str, Expr]
MOST_ROWS = 8
"""The most slots of a tile: as in a matmul."""


@dataclass(frozen=True)
class Side:
    """One of the two products: a stack of matrices, and how its inputs and outputs lie in scratch.

    `weight`, `inputs`, `sums`, `out`: names of buffers. `dot` is None if the matrices are dense.
    """

    matrix: Matrix
    unit: Unit
    rows: int
    dot: DotSums | None
    weight: str
    inputs: str
    sums: str
    out: str

    @classmethod
    def of(cls, matrix: Matrix, unit: Unit, rows: int, weight: str, first: int) -> Side:
        """The product by `matrix` with tiles of at most `rows` slots; `first`: the number of its first
        scratch.
        """
        sums = SUMS[unit.dot] if matrix.quantized else 1
        wide, columns = tile(unit, rows, sums) if matrix.quantized else tile(unit, rows, 1, (v.ROWS,))
        dot = products(unit, matrix, wide, columns) if matrix.quantized else None
        return cls(matrix, unit, wide, dot, weight, *(f"scratch:{first + i}" for i in range(3)))

    @property
    def blocks(self) -> int:
        """Blocks of outputs of one matrix."""
        return packing.blocks(self.matrix.each.n)

    def scratch(self, slots: int) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the inputs of `slots` slots, their scales and sums, and the outputs."""
        out = ((slots, self.blocks * v.ROWS), "float32")
        if self.dot is None:
            return [((slots, self.matrix.k), "float32"), ((1,), "float32"), out]
        return [*self.rounding.scratch(slots), out]

    @property
    def rounding(self) -> Rounding:
        """How quantized matrices want their inputs."""
        assert self.dot is not None
        (rounding,) = Rounding.of([self.dot])
        return rounding

    def accumulate(self, buf: Buffers, block: Expr, t: Expr, acc: Expr) -> None:
        """acc[r] = inputs of slot r of tile t · a block of weights."""
        if self.dot is None:
            x, weight = buf[self.inputs], buf[self.weight]
            first = T.Bind(t * self.rows)
            linear_dense.accumulate(self.matrix, self.unit, weight, x, block, first, self.rows, acc)
            return
        x = self.rounding.inputs(buf[self.inputs], buf[self.sums])
        linear_tiles.accumulate(self.matrix, self.unit, self.dot, x, buf[self.weight], block, t, acc)


@dataclass(frozen=True)
class ExpertTiles:
    """The tiles of a step, int32 in one scratch: for each slot its pair (−1: none), for each pair its slot
    (−1: its row is padding), for each tile its expert, for each expert a counter, and the number of tiles.
    """

    job: Experts
    rows: int

    @classmethod
    def of(cls, job: Experts, unit: Unit) -> ExpertTiles:
        """Tiles about as high as an expert has rows if all experts are chosen equally often."""
        expected = max(1, job.m * job.top // job.experts)
        rows = max(n for n in (1, 2, 4, MOST_ROWS) if n <= expected)
        return cls(job, min(Side.of(matrix, unit, rows, "", 0).rows for matrix in (job.gate_up, job.down)))

    @property
    def pairs(self) -> int:
        """Rows times experts of a row."""
        return self.job.m * self.job.top

    @property
    def tiles(self) -> int:
        """The most tiles: every chosen expert may have one that is not full."""
        return (self.pairs + min(self.job.experts, self.pairs) * (self.rows - 1)) // self.rows

    @property
    def slots(self) -> int:
        """The most slots."""
        return self.tiles * self.rows

    def starts(self) -> tuple[int, int, int, int, int]:
        """Where slots, pairs, tiles, experts and the number of tiles begin, and the size of all."""
        pairs, tiles = self.slots, self.slots + self.pairs
        experts = tiles + self.tiles
        return pairs, tiles, experts, experts + self.job.experts, experts + self.job.experts + 1

    def expert(self, plan: Expr, t: Expr) -> Expr:
        return T.Bind(plan[self.starts()[1] + t])

    def count(self, plan: Expr) -> Expr:
        """The number of tiles."""
        return T.Bind(plan[self.starts()[3]])

    def slot(self, plan: Expr, pair: Expr) -> Expr:
        """The slot of a pair."""
        return T.Bind(plan[self.starts()[0] + pair])

    def build(self, plan: Expr, route: Expr) -> None:
        """Sort the pairs by expert, in their order, into tiles."""
        top, (pairs, tiles, experts, count, _) = self.job.top, self.starts()

        def expert_of(pair: Expr) -> Expr:
            return T.Bind(tirx.Cast("int32", route[pair // top, pair % top]))

        with T.serial(0, self.job.experts) as e:
            v.put1(plan, [experts + e], v.i32(0))
        with T.serial(0, self.pairs) as pair:
            expert = expert_of(pair)
            with T.If(expert >= 0), T.Then():
                v.put1(plan, [experts + expert], plan[experts + expert] + 1)
        v.put1(plan, [count], v.i32(0))
        with T.serial(0, self.job.experts) as e:
            own = T.Bind((plan[experts + e] + (self.rows - 1)) // self.rows)
            first = v.scalar("int32")
            v.put1(first, [0], plan[count])
            with T.serial(0, own) as i:
                v.put1(plan, [tiles + first[0] + i], e)
            v.put1(plan, [experts + e], first[0] * self.rows)
            v.put1(plan, [count], first[0] + own)
        with T.serial(0, plan[count] * self.rows) as slot:
            v.put1(plan, [slot], v.i32(-1))
        with T.serial(0, self.pairs) as pair:
            expert = expert_of(pair)
            v.put1(plan, [pairs + pair], v.i32(-1))
            with T.If(expert >= 0), T.Then():
                v.put1(plan, [pairs + pair], plan[experts + expert])
                v.put1(plan, [plan[experts + expert]], pair)
                v.put1(plan, [experts + expert], plan[experts + expert] + 1)


def experts(job: Experts, unit: Unit) -> Staged:
    """The launch of an Experts job."""
    tiling = ExpertTiles.of(job, unit)
    first = Side.of(job.gate_up, unit, tiling.rows, "w0", 1)
    last = Side.of(job.down, unit, tiling.rows, "w1", 4)
    scratch = [((tiling.starts()[-1],), "int32"), *first.scratch(tiling.slots), *last.scratch(tiling.slots)]
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "x": ((job.m, job.k), "float32"), "route": ((job.m, 2 * job.top), "float32"),
        "gate_up_bias": ((job.gate_up.n,), "float32"), "down_bias": ((job.down.n,), "float32"),
        "out": job.out,
    }  # fmt: skip
    for side in (first, last):
        (part,) = packing.parts(side.matrix)
        shapes[side.weight] = part.shape, part.dtype
    shapes |= {f"scratch:{i}": each for i, each in enumerate(scratch)}
    names = (*job.inputs(2), *(f"scratch:{i}" for i in range(len(scratch))), "out")
    args = [(name.replace(":", "_"), *shapes[name]) for name in names]

    def body(*buffers: Expr) -> None:
        _body(job, tiling, first, last, dict(zip(names, buffers, strict=True)))

    return Staged((Stage(v.prim_func("experts", args, body), names),), tuple(scratch))


def _body(job: Experts, tiling: ExpertTiles, first: Side, last: Side, buf: Buffers) -> None:
    plan = buf["scratch:0"]
    tiling.build(plan, buf["route"])
    tiles = tiling.count(plan)
    with _slots(tiling, plan, tiles) as slot:
        pair = T.Bind(plan[slot])
        with T.If(pair >= 0), T.Then():
            row = T.Bind(pair // job.top)
            _fill(first, buf, slot, lambda i, count: v.some(buf["x"], [row, i], count))
    _products(first, tiling, buf, tiles)
    with _slots(tiling, plan, tiles) as slot, T.If(plan[slot] >= 0), T.Then():
        expert = tiling.expert(plan, T.Bind(slot // tiling.rows))
        _fill(last, buf, slot, lambda i, count: _hidden(job, buf, buf[first.out], slot, expert, i, count))
    _products(last, tiling, buf, tiles)
    with v.rows(job.m) as m:
        _sum(job, tiling, buf, buf[last.out], m)


def _slots(tiling: ExpertTiles, plan: Expr, tiles: Expr) -> Any:
    """A loop over the slots."""
    if tiling.pairs < SHARED_FROM:
        return T.serial(0, tiles * tiling.rows)
    return v.parallel(T.Bind(tiles * tiling.rows))


def _fill(side: Side, buf: Buffers, slot: Expr, value_at: Any) -> None:
    """Write the inputs of a slot; `value_at` gives some values from an input on, the rest of 16 as zeros."""
    if side.dot is not None:
        whole = lambda i: value_at(i, v.LANES)  # noqa: E731
        side.rounding.write(whole, slot, buf[side.inputs], buf[side.sums])
        return
    k = side.matrix.k
    with T.serial(0, k // v.LANES) as i:
        v.put(buf[side.inputs], [slot, i * v.LANES], value_at(i * v.LANES, v.LANES))
    if k % v.LANES:
        at = v.i32(k - k % v.LANES)
        v.put_some(buf[side.inputs], [slot, at], value_at(at, k % v.LANES), k % v.LANES)


def _products(side: Side, tiling: ExpertTiles, buf: Buffers, tiles: Expr) -> None:
    """Multiply the inputs of all tiles by the matrices of their experts."""
    with v.parallel(side.blocks) as block, T.serial(0, tiles) as t:
        acc = v.local((side.rows, v.ROWS), "float32")
        expert = tiling.expert(buf["scratch:0"], t)
        side.accumulate(buf, T.Bind(expert * side.blocks + block), t, acc)
        for r in range(side.rows):
            v.put(buf[side.out], [t * side.rows + r, block * v.ROWS], v.lanes(acc, [r, 0]))


def _hidden(job: Experts, buf: Buffers, gate_up: Expr, slot: Expr, expert: Expr, i: Expr, count: int) -> Expr:
    """Some hidden values of a slot, from value i on."""
    starts = (0, job.inner) if job.gated else (0,)
    made = [v.some(gate_up, [slot, i + at], count) for at in starts]
    if job.gate_up_bias:
        begin = T.Bind(expert * (len(starts) * job.inner) + i)
        made = [
            T.Bind(value + v.some(buf["gate_up_bias"], [begin + at], count))
            for value, at in zip(made, starts, strict=True)
        ]
    if not job.gated:
        return T.Bind(ACTIVATIONS[job.activation](made[0]))
    gate, up = made
    if job.clamp is None:
        return T.Bind(ACTIVATIONS[job.activation](gate) * up)
    alpha, limit = job.clamp
    gate = v.keep(tirx.min(gate, v.splat(limit)))
    up = T.Bind(tirx.max(tirx.min(up, v.splat(limit)), v.splat(-limit)))
    glu = T.Bind(gate / (v.splat(1.0) + v.exp(v.splat(-alpha) * gate)))
    return T.Bind((up + v.splat(1.0)) * glu)


def _sum(job: Experts, tiling: ExpertTiles, buf: Buffers, made: Expr, m: Expr) -> None:
    """Write the weighted sum of a row's experts, in the order in which the row has chosen them."""
    plan = buf["scratch:0"]

    def some(i: Expr, count: int) -> None:
        total = v.registers(1)
        v.put1(total, [0], v.splat(0.0))
        with T.serial(0, job.top) as j:
            slot = tiling.slot(plan, T.Bind(m * job.top + j))
            with T.If(slot >= 0), T.Then():
                value = v.lanes(made, [slot, i])
                if job.down_bias:
                    expert = tiling.expert(plan, T.Bind(slot // tiling.rows))
                    value = T.Bind(value + v.some(buf["down_bias"], [T.Bind(expert * job.n + i)], count))
                v.put1(total, [0], total[0] + value * v.splat(buf["route"][m, j + job.top]))
        v.put_some(buf["out"], [m, i], T.Bind(total[0]), count)

    with T.serial(0, job.n // v.LANES) as i:
        some(i * v.LANES, v.LANES)
    if job.n % v.LANES:
        some(v.i32(job.n - job.n % v.LANES), job.n % v.LANES)
