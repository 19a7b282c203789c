"""The gated delta rule: heads in parallel; the rows of a sequence in chunks of sixteen, or one by one if they
are few.

Rows one by one read and write the whole state for each. A chunk of n rows reads and writes it once. S is the
state before the chunk, G_r the sum of the logarithms of decay up to row r, and d_r what row r adds along k_r:
    d_r = β_r · (v_r − e^G_r · Sᵀk_r − Σ_{i<r} e^(G_r − G_i) · (k_i·k_r) · d_i)
    out_r = e^G_r · Sᵀq_r + Σ_{i≤r} e^(G_r − G_i) · (k_i·q_r) · d_i
    S ← e^G_n · S + Σ_i e^(G_n − G_i) · k_i ⊗ d_i
That is the WY form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (2024), by forward
substitution. It rounds differently than the rows one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Delta
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.units import Unit

Expr = Any
CHUNK = v.LANES
"""Rows of a chunk: one lane each."""
FEWEST = 4
"""Rows from which a chunk, which computes all sixteen, costs less than the rows one by one."""
TILE = 4
"""Rows of a chunk whose products with the state are summed together."""
SOME = 8
"""Vectors of columns that a row's state is updated in together."""


@dataclass(frozen=True)
class _Head:
    """A head of values in a step: its buffers, and the first columns of its q, k and v in x."""

    job: Delta
    buf: dict[str, Expr]
    head: Expr
    q: Expr
    k: Expr
    v: Expr

    def decay(self, a: Expr) -> Expr:
        """−exp(a_log) · softplus(a + dt_bias): the logarithm of the decay, on sixteen lanes."""
        a = v.keep(a + v.splat(self.buf["dt_bias"][self.head]))
        soft = T.Bind(tirx.max(a, v.splat(0.0)) + v.log(v.splat(1.0) + v.exp(v.splat(0.0) - tirx.abs(a))))
        return v.keep(v.splat(0.0) - v.exp(v.splat(self.buf["a_log"][self.head])) * soft)


def delta(job: Delta, unit: Unit) -> Staged:
    """The launch of a Delta job. Programs of few rows have no chunks."""
    chunked, job = job.m >= FEWEST, opened(job)
    known: dict[str, tuple[tuple[Any, ...], str]] = {
        "x": ((job.m, job.x_width), "float32"), "gates": ((job.m, 2 * job.heads), "float32"),
        "a_log": ((job.heads,), "float32"), "dt_bias": ((job.heads,), "float32"), "out": job.out,
        "state": ((tirx.Var("pages", "int32"), job.heads, job.key_dim, job.value_dim), "float32"),
        "positions": ((MAX_STEP,), "int32"), "slots": ((MAX_STEP,), "int32"),
        "page_table": ((job.slots, job.pages_per_slot), "int32"),
    }  # fmt: skip
    names = (*job.inputs(), "out")

    def body(*buffers: Expr) -> None:
        buf = dict(zip(names, buffers, strict=True))
        keys = job.key_heads * job.key_dim
        with v.parallel(job.heads) as head:
            q = T.Bind(head // (job.heads // job.key_heads) * job.key_dim)
            at = _Head(job, buf, head, q, T.Bind(q + keys), T.Bind(2 * keys + head * job.value_dim))
            _rows(at, chunked)

    return Staged((Stage(v.prim_func("delta", [(name, *known[name]) for name in names], body), names),))


def _rows(at: _Head, chunked: bool) -> None:
    """All rows of the step in order. `next`: the first row that no chunk has taken."""
    job, buf = at.job, at.buf
    upcoming = v.scalar("int32")
    v.put1(upcoming, [0], v.i32(0))
    with T.serial(0, job.m) as m, T.If(m == upcoming[0]), T.Then():
        position = T.Bind(buf["positions"][m])
        v.put1(upcoming, [0], m + 1)
        with T.If(position < 0):
            with T.Then():
                _each(
                    job,
                    lambda j, n: v.put_some(buf["out"], [m, at.head * job.value_dim + j], v.splat(0.0), n),
                )
            with T.Else():
                page = _opened(at, m, position)
                if not chunked:
                    _row(at, m, page)
                else:
                    count = _follow(at, m, position)
                    with T.If(count < FEWEST):
                        with T.Then():
                            _row(at, m, page)
                        with T.Else():
                            v.put1(upcoming, [0], m + count)
                            _chunk(at, m, count, page)


def _opened(at: _Head, m: Expr, position: Expr) -> Expr:
    """The page of a row's column, with the state before the row; the first row of a column copies it."""
    job, state = at.job, at.buf["state"]
    slot = T.Bind(at.buf["slots"][m])
    page = T.Bind(at.buf["page_table"][slot, position // job.stride])
    with T.If(position % job.stride == 0), T.Then():
        before = T.Bind(at.buf["page_table"][slot, tirx.max(position - 1, 0) // job.stride])
        with T.serial(0, job.key_dim) as i:

            def moved(j: Expr, n: int) -> None:
                with T.If(position == 0):
                    with T.Then():
                        v.put_some(state, [page, at.head, i, j], v.splat(0.0), n)
                    with T.Else():
                        v.put_some(state, [page, at.head, i, j], v.some(state, [before, at.head, i, j], n), n)

            _each(job, moved)
    return page


def _follow(at: _Head, m: Expr, position: Expr) -> Expr:
    """How many rows from m on continue one another within a column, at most CHUNK."""
    job, buf = at.job, at.buf
    count = v.scalar("int32")
    v.put1(count, [0], v.i32(1))
    with T.serial(1, CHUNK) as r, T.If(tirx.all(count[0] == r, m + r < job.m)), T.Then():
        same = tirx.all(buf["slots"][m + r] == buf["slots"][m], buf["positions"][m + r] == position + r)
        with T.If(tirx.all(same, (position + r) % job.stride != 0)), T.Then():
            v.put1(count, [0], r + 1)
    return T.Bind(count[0])


def _each(job: Delta, body: Callable[[Expr, int], None]) -> None:
    """Call body(first column, lanes) for all columns of a head: whole vectors, then the rest."""
    with T.serial(0, job.value_dim // v.LANES) as j:
        body(j * v.LANES, v.LANES)
    if rest := job.value_dim % v.LANES:
        body(v.i32(job.value_dim - rest), rest)


def _length(at: _Head, m: Expr, first: Expr) -> Expr:
    """1 / sqrt(Σ x² + eps) over the key_dim columns of x[m] from `first` on."""
    total = v.scalar("float32")
    v.put1(total, [0], v.f32(at.job.eps))
    with T.serial(0, at.job.key_dim) as i:
        v.put1(total, [0], total[0] + at.buf["x"][m, first + i] * at.buf["x"][m, first + i])
    return T.Bind(v.f32(1.0) / tirx.sqrt(total[0]))


def _row(at: _Head, m: Expr, page: Expr) -> None:
    """One row: the state is read for what k finds in it, then changed and read by q."""
    job, buf, state = at.job, at.buf, at.buf["state"]
    x, gates = buf["x"], buf["gates"]
    of_q, of_k = _length(at, m, at.q), _length(at, m, at.k)
    decay = v.keep(v.exp(at.decay(v.splat(gates[m, at.head]))))
    rate = v.keep(
        v.splat(1.0) / (v.splat(1.0) + v.exp(v.splat(0.0) - v.splat(gates[m, job.heads + at.head])))
    )
    scale = v.f32(job.key_dim**-0.5)

    def columns(parts: list[tuple[Expr, int]]) -> None:
        change, out = v.registers(len(parts)), v.registers(len(parts))
        for each in range(len(parts)):
            v.put1(change, [each], v.splat(0.0))
            v.put1(out, [each], v.splat(0.0))
        with T.serial(0, job.key_dim) as i:
            key = T.Bind(v.splat(x[m, at.k + i] * of_k))
            for each, (j, n) in enumerate(parts):
                v.put1(change, [each], change[each] + v.some(state, [page, at.head, i, j], n) * key)
        for each, (j, n) in enumerate(parts):
            value = v.some(x, [m, at.v + j], n)
            v.put1(change, [each], (value - decay * change[each]) * rate)
        with T.serial(0, job.key_dim) as i:
            key, query = (
                T.Bind(v.splat(x[m, at.k + i] * of_k)),
                T.Bind(v.splat(x[m, at.q + i] * (of_q * scale))),
            )
            for each, (j, n) in enumerate(parts):
                after = T.Bind(v.some(state, [page, at.head, i, j], n) * decay + key * change[each])
                v.put_some(state, [page, at.head, i, j], after, n)
                v.put1(out, [each], out[each] + after * query)
        for each, (j, n) in enumerate(parts):
            v.put_some(buf["out"], [m, at.head * job.value_dim + j], out[each], n)

    wide, size = SOME * v.LANES, job.value_dim
    if size >= wide:
        with T.serial(0, size // wide) as part:
            columns([(T.Bind(part * wide + each * v.LANES), v.LANES) for each in range(SOME)])
    if rest := size % wide:
        starts = range(size - rest, size, v.LANES)
        columns([(v.i32(start), min(v.LANES, size - start)) for start in starts])


def _chunk(at: _Head, m: Expr, count: Expr, page: Expr) -> None:
    """Rows m to m + count, of which those beyond `count` are zeros that change nothing."""
    job, buf, state = at.job, at.buf, at.buf["state"]
    keys, queries = (v.local((job.key_dim * CHUNK,), "float32") for _ in range(2))
    rate, grown = v.local((CHUNK,), "float32"), v.local((CHUNK,), "float32")
    _load(at, m, count, keys, queries, rate, grown)
    total = T.Bind(grown[CHUNK - 1])
    by_key, by_query = (v.local((CHUNK * CHUNK,), "float32") for _ in range(2))
    _products(at, keys, keys, grown, by_key)
    _products(at, queries, keys, grown, by_query)
    powers, last = v.local((CHUNK,), "float32"), v.local((CHUNK,), "float32")
    sums = v.lanes(grown, [0])
    v.put(powers, [0], v.exp(sums))
    v.put(last, [0], v.exp(v.splat(total) - sums))
    end = v.keep(v.exp(v.splat(total)))
    found, seen, added = (v.registers(CHUNK) for _ in range(3))

    def columns(j: Expr, n: int) -> None:
        with T.serial(0, CHUNK // TILE) as tile:
            sums = v.registers(2 * TILE)
            for r in range(2 * TILE):
                v.put1(sums, [r], v.splat(0.0))
            with T.serial(0, job.key_dim) as i:
                part = v.some(state, [page, at.head, i, j], n)
                for r in range(TILE):
                    for which, rows in enumerate((keys, queries)):
                        factor = v.splat(rows[i * CHUNK + tile * TILE + r])
                        v.put1(sums, [which * TILE + r], sums[which * TILE + r] + part * factor)
            for r in range(TILE):
                v.put1(found, [tile * TILE + r], sums[r])
                v.put1(seen, [tile * TILE + r], sums[TILE + r])
        with T.serial(0, CHUNK) as r:
            v.put1(added, [r], v.splat(0.0))
        with T.serial(0, CHUNK) as r, T.If(r < count), T.Then():
            sum_ = v.registers(1)
            v.put1(sum_, [0], v.some(buf["x"], [m + r, at.v + j], n) - found[r] * v.splat(powers[r]))
            with T.serial(0, r) as i:
                v.put1(sum_, [0], sum_[0] - added[i] * v.splat(by_key[r * CHUNK + i]))
            v.put1(added, [r], sum_[0] * v.splat(rate[r]))
            v.put1(sum_, [0], seen[r] * v.splat(powers[r]))
            with T.serial(0, r + 1) as i:
                v.put1(sum_, [0], sum_[0] + added[i] * v.splat(by_query[r * CHUNK + i]))
            v.put_some(buf["out"], [m + r, at.head * job.value_dim + j], sum_[0], n)
        moved = v.registers(CHUNK)
        for r in range(CHUNK):
            v.put1(moved, [r], added[r] * v.splat(last[r]))
        with T.serial(0, job.key_dim) as i:
            after = v.registers(1)
            v.put1(after, [0], v.some(state, [page, at.head, i, j], n) * end)
            for r in range(CHUNK):
                v.put1(after, [0], after[0] + moved[r] * v.splat(keys[i * CHUNK + r]))
            v.put_some(state, [page, at.head, i, j], after[0], n)

    _each(job, columns)


def _load(at: _Head, m: Expr, count: Expr, keys: Expr, queries: Expr, rate: Expr, grown: Expr) -> None:
    """Fill a chunk's keys and queries [key_dim, CHUNK], of length 1; its rates; and its sums of logarithms of
    decay.
    """
    job, x, gates = at.job, at.buf["x"], at.buf["gates"]
    scale = v.f32(job.key_dim**-0.5)
    with T.serial(0, CHUNK) as r, T.If(r < count):
        with T.Then():
            of_q, of_k = _length(at, m + r, at.q), _length(at, m + r, at.k)
            with T.serial(0, job.key_dim) as i:
                v.put1(keys, [i * CHUNK + r], x[m + r, at.k + i] * of_k)
                v.put1(queries, [i * CHUNK + r], x[m + r, at.q + i] * (of_q * scale))
            v.put1(grown, [r], gates[m + r, at.head])
            v.put1(rate, [r], gates[m + r, job.heads + at.head])
        with T.Else():
            with T.serial(0, job.key_dim) as i:
                v.put1(keys, [i * CHUNK + r], v.f32(0.0))
                v.put1(queries, [i * CHUNK + r], v.f32(0.0))
            v.put1(grown, [r], v.f32(0.0))
            v.put1(rate, [r], v.f32(0.0))
    v.put(rate, [0], v.splat(1.0) / (v.splat(1.0) + v.exp(v.splat(0.0) - v.lanes(rate, [0]))))
    v.put(grown, [0], at.decay(v.lanes(grown, [0])))
    with T.serial(1, CHUNK) as r:
        v.put1(grown, [r], grown[r - 1] + tirx.Select(r < count, grown[r], v.f32(0.0)))


def _products(at: _Head, rows: Expr, keys: Expr, grown: Expr, out: Expr) -> None:
    """out[r, i] = e^(G_r − G_i) · rows_r·k_i for i ≤ r; other elements have no meaning."""
    with T.serial(0, CHUNK // TILE) as tile:
        sums = v.registers(TILE)
        for r in range(TILE):
            v.put1(sums, [r], v.splat(0.0))
        with T.serial(0, at.job.key_dim) as i:
            key = v.lanes(keys, [i * CHUNK])
            for r in range(TILE):
                v.put1(sums, [r], sums[r] + key * v.splat(rows[i * CHUNK + tile * TILE + r]))
        for r in range(TILE):
            row = T.Bind(tile * TILE + r)
            shrunk = v.exp(v.splat(grown[row]) - v.lanes(grown, [0]))
            v.put(out, [row * CHUNK], sums[r] * shrunk)
