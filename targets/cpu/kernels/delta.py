"""The gated delta rule as a recurrence (recurrence.py). What a row adds along its key k_r depends on what the
key finds in the state:
    d_r = β_r · (v_r − e^G_r · Sᵀk_r − Σ_{i<r} e^(G_r − G_i) · (k_i·k_r) · d_i)
That is the WY form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (2024), by forward
substitution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import Staged
from nearfar.kernels.jobs import Delta
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
    products,
    rows,
)
from nearfar.targets.cpu.units import Unit

Expr = Any


@dataclass(frozen=True)
class _Head(StateHead):
    """A head of values, with the first columns of its q, k and v in x."""

    job: Delta
    q: Expr
    k: Expr
    v: Expr
    finds: ClassVar = True

    def decay(self, a: Expr) -> Expr:
        """−exp(a_log) · softplus(a + dt_bias): the logarithm of the decay, on sixteen lanes."""
        soft = softplus(a + v.splat(self.buf["dt_bias"][self.head]))
        return v.keep(v.splat(0.0) - v.exp(v.splat(self.buf["a_log"][self.head])) * soft)

    def row(self, m: Expr, page: Expr) -> None:
        """Read the state for what k finds in it, then change it, and read it by q."""
        job, buf, state = self.job, self.buf, self.buf["state"]
        x, gates = buf["x"], buf["gates"]
        of_q, of_k = self._length(m, self.q), self._length(m, self.k)
        decay = v.keep(v.exp(self.decay(v.splat(gates[m, self.head]))))
        rate = v.keep(
            v.splat(1.0) / (v.splat(1.0) + v.exp(v.splat(0.0) - v.splat(gates[m, job.heads + self.head])))
        )
        scale = v.f32(job.key_dim**-0.5)

        def columns(parts: list[tuple[Expr, int]]) -> None:
            change, out = v.registers(len(parts)), v.registers(len(parts))
            for each in range(len(parts)):
                v.put1(change, [each], v.splat(0.0))
                v.put1(out, [each], v.splat(0.0))
            with T.serial(0, job.key_dim) as i:
                key = T.Bind(v.splat(x[m, self.k + i] * of_k))
                for each, (j, n) in enumerate(parts):
                    v.put1(change, [each], change[each] + v.some(state, [page, self.head, i, j], n) * key)
            for each, (j, n) in enumerate(parts):
                value = v.some(x, [m, self.v + j], n)
                v.put1(change, [each], (value - decay * change[each]) * rate)
            with T.serial(0, job.key_dim) as i:
                key, query = (
                    T.Bind(v.splat(x[m, self.k + i] * of_k)),
                    T.Bind(v.splat(x[m, self.q + i] * (of_q * scale))),
                )
                for each, (j, n) in enumerate(parts):
                    after = T.Bind(v.some(state, [page, self.head, i, j], n) * decay + key * change[each])
                    v.put_some(state, [page, self.head, i, j], after, n)
                    v.put1(out, [each], out[each] + after * query)
            for each, (j, n) in enumerate(parts):
                v.put_some(buf["out"], [m, self.first + j], out[each], n)

        blocks(self, columns)

    def load(self, chunk: ChunkRows) -> Expr:
        """See StateHead: keys and queries of length 1. The result: the rates, and e^(G_r − G_i) · k_r·k_i."""
        job, x, gates = self.job, self.buf["x"], self.buf["gates"]
        m, scale, grown = chunk.m, v.f32(job.key_dim**-0.5), chunk.grown
        rate = v.local((CHUNK,), "float32")
        with T.serial(0, CHUNK) as r, T.If(r < chunk.count):
            with T.Then():
                of_q, of_k = self._length(m + r, self.q), self._length(m + r, self.k)
                with T.serial(0, job.key_dim) as i:
                    v.put1(chunk.keys, [i * CHUNK + r], x[m + r, self.k + i] * of_k)
                    v.put1(chunk.queries, [i * CHUNK + r], x[m + r, self.q + i] * (of_q * scale))
                v.put1(grown, [r], gates[m + r, self.head])
                v.put1(rate, [r], gates[m + r, job.heads + self.head])
            with T.Else():
                chunk.clear(r)
                v.put1(rate, [r], v.f32(0.0))
        v.put(rate, [0], v.splat(1.0) / (v.splat(1.0) + v.exp(v.splat(0.0) - v.lanes(rate, [0]))))
        v.put(grown, [0], self.decay(v.lanes(grown, [0])))
        chunk.sum_up()
        return rate, products(chunk, chunk.keys)

    def change(self, chunk: ChunkRows, loaded: Expr, j: Expr, n: int, found: Expr, added: Expr) -> None:
        """See StateHead: what is missing from the value, row by row."""
        rate, by_key = loaded
        with T.serial(0, CHUNK) as r, T.If(r < chunk.count), T.Then():
            sum_ = v.registers(1)
            v.put1(sum_, [0], v.some(self.buf["x"], [chunk.m + r, self.v + j], n) - found[r])
            with T.serial(0, r) as i:
                v.put1(sum_, [0], sum_[0] - added[i] * v.splat(by_key[r * CHUNK + i]))
            v.put1(added, [r], sum_[0] * v.splat(rate[r]))

    def _length(self, m: Expr, first: Expr) -> Expr:
        """1 / sqrt(Σ x² + eps) over the key_dim columns of x[m] from `first` on."""
        total = v.scalar("float32")
        v.put1(total, [0], v.f32(self.job.eps))
        with T.serial(0, self.job.key_dim) as i:
            v.put1(total, [0], total[0] + self.buf["x"][m, first + i] * self.buf["x"][m, first + i])
        return T.Bind(v.f32(1.0) / tirx.sqrt(total[0]))


def delta(job: Delta, unit: Unit) -> Staged:
    """The launch of a Delta job. Programs of few rows have no chunks."""
    chunked, job = job.m >= FEWEST, opened(job)
    shape = RecurrenceShape(job.m, job.heads, job.key_dim, job.value_dim, job.stride)
    known = {
        "x": (job.m, job.x_width), "gates": (job.m, 2 * job.heads), "a_log": (job.heads,),
        "dt_bias": (job.heads,), "state": (tirx.Var("pages", "int32"), job.heads, job.key_dim, job.value_dim),
    }  # fmt: skip

    def body(buf: dict[str, Expr]) -> None:
        keys = job.key_heads * job.key_dim
        with v.parallel(job.heads) as head:
            q = T.Bind(job.key_head(head) * job.key_dim)
            values = T.Bind(2 * keys + head * job.value_dim)
            rows(_Head(shape, buf, head, job, q, T.Bind(q + keys), values), chunked)

    return launch("delta", job, known, body)
