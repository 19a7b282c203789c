"""The state space of Mamba-2 as a recurrence (recurrence.py): keys are B, queries are C, and a row adds
d_r = dt_r · x_r, whatever the state holds. That is the form of chunks of Dao & Gu, "Transformers are SSMs"
(2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import Staged
from nearfar.kernels.jobs import Ssm
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.activations import softplus
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.pages import launch
from nearfar.targets.cpu.kernels.recurrence import (
    CHUNK,
    FEWEST,
    ChunkRows,
    RecurrenceShape,
    StateHead,
    blocks,
    rows,
)
from nearfar.targets.cpu.units import Unit

Expr = Any


@dataclass(frozen=True)
class _Head(StateHead):
    """A head, with the first columns of its x, B and C in x."""

    job: Ssm
    x: Expr
    b: Expr
    c: Expr

    def term(self, which: int) -> Expr:
        """The head's a_log, dt_bias or d, on sixteen lanes."""
        return v.splat(self.buf["terms"][which * self.job.heads + self.head])

    def step(self, dt: Expr) -> Expr:
        """The dt that the state sees: softplus(dt + dt_bias) within the limits, on sixteen lanes."""
        soft = softplus(dt + self.term(1))
        if self.job.least > 0:
            soft = T.Bind(tirx.max(soft, v.splat(self.job.least)))
        if self.job.most is not None:
            soft = T.Bind(tirx.min(soft, v.splat(self.job.most)))
        return v.keep(soft)

    def decay(self, dt: Expr) -> Expr:
        """−exp(a_log) · dt: the logarithm of the decay, on sixteen lanes."""
        return v.keep(v.splat(0.0) - v.exp(self.term(0)) * dt)

    def row(self, m: Expr, page: Expr) -> None:
        """Change the state, and read it, in one pass."""
        job, x, state = self.job, self.buf["x"], self.buf["state"]
        dt = self.step(v.splat(self.buf["dt"][m, self.head]))
        decay = v.keep(v.exp(self.decay(dt)))

        def columns(parts: list[tuple[Expr, int]]) -> None:
            change, out = v.registers(len(parts)), v.registers(len(parts))
            for each, (j, n) in enumerate(parts):
                v.put1(change, [each], v.some(x, [m, self.x + j], n) * dt)
                v.put1(out, [each], self.skipped(m, j, n))
            with T.serial(0, job.depth) as i:
                key, query = (T.Bind(v.splat(x[m, first + i])) for first in (self.b, self.c))
                for each, (j, n) in enumerate(parts):
                    after = T.Bind(v.some(state, [page, self.head, i, j], n) * decay + key * change[each])
                    v.put_some(state, [page, self.head, i, j], after, n)
                    v.put1(out, [each], out[each] + after * query)
            for each, (j, n) in enumerate(parts):
                v.put_some(self.buf["out"], [m, self.first + j], out[each], n)

        blocks(self, columns)

    def load(self, chunk: ChunkRows) -> Expr:
        """See StateHead. The result: dt of the rows."""
        x, m, grown = self.buf["x"], chunk.m, chunk.grown
        dt = v.local((CHUNK,), "float32")
        with T.serial(0, CHUNK) as r, T.If(r < chunk.count):
            with T.Then():
                with T.serial(0, self.job.depth) as i:
                    v.put1(chunk.keys, [i * CHUNK + r], x[m + r, self.b + i])
                    v.put1(chunk.queries, [i * CHUNK + r], x[m + r, self.c + i])
                v.put1(dt, [r], self.buf["dt"][m + r, self.head])
            with T.Else():
                chunk.clear(r)
                v.put1(dt, [r], v.f32(0.0))
        v.put(dt, [0], self.step(v.lanes(dt, [0])))
        v.put(grown, [0], self.decay(v.lanes(dt, [0])))
        chunk.sum_up()
        return dt

    def change(self, chunk: ChunkRows, loaded: Expr, j: Expr, n: int, found: Expr, added: Expr) -> None:
        """See StateHead: dt · x."""
        with T.serial(0, CHUNK) as r, T.If(r < chunk.count), T.Then():
            v.put1(added, [r], v.some(self.buf["x"], [chunk.m + r, self.x + j], n) * v.splat(loaded[r]))

    def skipped(self, m: Expr, j: Expr, n: int) -> Expr:
        """See StateHead: d · x."""
        return T.Bind(v.some(self.buf["x"], [m, self.x + j], n) * self.term(2))


def ssm(job: Ssm, unit: Unit) -> Staged:
    """The launch of an Ssm job. Programs of few rows have no chunks."""
    chunked, job = job.m >= FEWEST, opened(job)
    shape = RecurrenceShape(job.m, job.heads, job.depth, job.head_dim, job.stride)
    known = {
        "x": (job.m, job.x_width), "dt": (job.m, job.heads), "terms": (3 * job.heads,),
        "state": (tirx.Var("pages", "int32"), job.heads, job.depth, job.head_dim),
    }  # fmt: skip

    def body(buf: dict[str, Expr]) -> None:
        inner = job.heads * job.head_dim
        with v.parallel(job.heads) as head:
            x = T.Bind(head * job.head_dim)
            b = T.Bind(inner + head // (job.heads // job.groups) * job.depth)
            rows(_Head(shape, buf, head, job, x, b, T.Bind(b + job.groups * job.depth)), chunked)

    return launch("ssm", job, known, body)
