"""The skeleton of recurrences over a state S [depth, width] for each head: heads in parallel; the rows of a
sequence in chunks of sixteen, or one by one if they are few.

Each row r has a key k_r, a query q_r [depth], a decay and a change d_r [width]:
    S ← decay_r · S + k_r ⊗ d_r,  out_r = Sᵀ q_r
Rows one by one read and write the whole state for each. A chunk of n rows reads and writes it once. S is the
state before the chunk, G_r the sum of the logarithms of decay up to row r:
    out_r = e^G_r · Sᵀq_r + Σ_{i≤r} e^(G_r − G_i) · (k_i·q_r) · d_i
    S ← e^G_n · S + Σ_i e^(G_n − G_i) · k_i ⊗ d_i
That rounds differently than the rows one by one. A `StateHead` says what keys, queries, decays and changes
are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v

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
class RecurrenceShape:
    """The sizes of a recurrence. `m`: rows; `stride`: positions of a column of pages."""

    m: Expr
    heads: int
    depth: int
    width: int
    stride: int


@dataclass(frozen=True)
class ChunkRows:
    """Rows m to m + count; values of the rows beyond `count` are zeros that change nothing.

    `keys`, `queries`: [depth, CHUNK]. `grown`: the sums of logarithms of decay, [CHUNK].
    """

    m: Expr
    count: Expr
    keys: Expr
    queries: Expr
    grown: Expr

    def clear(self, r: Expr) -> None:
        """Set the values of a row beyond `count` to zero."""
        (size,) = self.keys.shape
        with T.serial(0, int(size) // CHUNK) as i:
            v.put1(self.keys, [i * CHUNK + r], v.f32(0.0))
            v.put1(self.queries, [i * CHUNK + r], v.f32(0.0))
        v.put1(self.grown, [r], v.f32(0.0))

    def sum_up(self) -> None:
        """Replace the logarithms of decay in `grown` by their sums up to each row."""
        grown = self.grown
        with T.serial(1, CHUNK) as r:
            v.put1(grown, [r], grown[r - 1] + tirx.Select(r < self.count, grown[r], v.f32(0.0)))


@dataclass(frozen=True)
class StateHead(ABC):
    """A head in a step, with the job's buffers."""

    shape: RecurrenceShape
    buf: dict[str, Expr]
    head: Expr
    finds: ClassVar[bool] = False
    """Whether a change depends on what the key finds in the state, Sᵀk."""

    @abstractmethod
    def row(self, m: Expr, page: Expr) -> None:
        """Compute a row by itself."""

    @abstractmethod
    def load(self, chunk: ChunkRows) -> Expr:
        """Fill a chunk's keys, queries and sums; the result goes to `change`."""

    @abstractmethod
    def change(self, chunk: ChunkRows, loaded: Expr, j: Expr, n: int, found: Expr, added: Expr) -> None:
        """Write columns j to j + n of the changes of the chunk's `count` rows to `added`. `found`: of each
        row e^G · Sᵀk, if the head `finds`.
        """

    def skipped(self, m: Expr, j: Expr, n: int) -> Expr | None:
        """Columns j to j + n of what passes the state and joins a row's output."""
        return None

    @property
    def first(self) -> Expr:
        """The first column of the head in `out`."""
        return self.head * self.shape.width


def rows(at: StateHead, chunked: bool) -> None:
    """All rows of the step in order. `upcoming`: the first row that no chunk has taken."""
    buf = at.buf
    upcoming = v.scalar("int32")
    v.put1(upcoming, [0], v.i32(0))
    with T.serial(0, at.shape.m) as m, T.If(m == upcoming[0]), T.Then():
        position = T.Bind(buf["positions"][m])
        v.put1(upcoming, [0], m + 1)
        with T.If(position < 0):
            with T.Then():
                _each(at, lambda j, n: v.put_some(buf["out"], [m, at.first + j], v.splat(0.0), n))
            with T.Else():
                page = _opened(at, m, position)
                if not chunked:
                    at.row(m, page)
                else:
                    count = _follow(at, m, position)
                    with T.If(count < FEWEST):
                        with T.Then():
                            at.row(m, page)
                        with T.Else():
                            v.put1(upcoming, [0], m + count)
                            _chunk(at, m, count, page)


def blocks(at: StateHead, columns: Callable[[list[tuple[Expr, int]]], None]) -> None:
    """Call columns((first column, lanes) of some vectors) for all columns of a head."""
    wide, size = SOME * v.LANES, at.shape.width
    if size >= wide:
        with T.serial(0, size // wide) as part:
            columns([(T.Bind(part * wide + each * v.LANES), v.LANES) for each in range(SOME)])
    if rest := size % wide:
        starts = range(size - rest, size, v.LANES)
        columns([(v.i32(start), min(v.LANES, size - start)) for start in starts])


def _opened(at: StateHead, m: Expr, position: Expr) -> Expr:
    """The page of a row's column, with the state before the row; the first row of a column copies it."""
    stride, state = at.shape.stride, at.buf["state"]
    slot = T.Bind(at.buf["slots"][m])
    page = T.Bind(at.buf["page_table"][slot, position // stride])
    with T.If(position % stride == 0), T.Then():
        before = T.Bind(at.buf["page_table"][slot, tirx.max(position - 1, 0) // stride])
        with T.serial(0, at.shape.depth) as i:

            def moved(j: Expr, n: int) -> None:
                with T.If(position == 0):
                    with T.Then():
                        v.put_some(state, [page, at.head, i, j], v.splat(0.0), n)
                    with T.Else():
                        v.put_some(state, [page, at.head, i, j], v.some(state, [before, at.head, i, j], n), n)

            _each(at, moved)
    return page


def _follow(at: StateHead, m: Expr, position: Expr) -> Expr:
    """How many rows from m on continue one another within a column, at most CHUNK."""
    shape, buf = at.shape, at.buf
    count = v.scalar("int32")
    v.put1(count, [0], v.i32(1))
    with T.serial(1, CHUNK) as r, T.If(tirx.all(count[0] == r, m + r < shape.m)), T.Then():
        same = tirx.all(buf["slots"][m + r] == buf["slots"][m], buf["positions"][m + r] == position + r)
        with T.If(tirx.all(same, (position + r) % shape.stride != 0)), T.Then():
            v.put1(count, [0], r + 1)
    return T.Bind(count[0])


def _each(at: StateHead, body: Callable[[Expr, int], None]) -> None:
    """Call body(first column, lanes) for all columns of a head: whole vectors, then the rest."""
    width = at.shape.width
    with T.serial(0, width // v.LANES) as j:
        body(j * v.LANES, v.LANES)
    if rest := width % v.LANES:
        body(v.i32(width - rest), rest)


def _chunk(at: StateHead, m: Expr, count: Expr, page: Expr) -> None:
    """Compute the rows of a chunk."""
    depth, buf, state = at.shape.depth, at.buf, at.buf["state"]
    keys, queries = (v.local((depth * CHUNK,), "float32") for _ in range(2))
    chunk = ChunkRows(m, count, keys, queries, v.local((CHUNK,), "float32"))
    loaded = at.load(chunk)
    total = T.Bind(chunk.grown[CHUNK - 1])
    by_query = products(chunk, queries)
    powers, last = v.local((CHUNK,), "float32"), v.local((CHUNK,), "float32")
    sums = v.lanes(chunk.grown, [0])
    v.put(powers, [0], v.exp(sums))
    v.put(last, [0], v.exp(v.splat(total) - sums))
    end = v.keep(v.exp(v.splat(total)))
    seen, found, added = v.registers(CHUNK), v.registers(CHUNK if at.finds else 1), v.registers(CHUNK)
    wanted = [(queries, seen), *([(keys, found)] if at.finds else [])]

    def columns(j: Expr, n: int) -> None:
        with T.serial(0, CHUNK // TILE) as tile:
            sums = v.registers(len(wanted) * TILE)
            for r in range(len(wanted) * TILE):
                v.put1(sums, [r], v.splat(0.0))
            with T.serial(0, depth) as i:
                part = v.some(state, [page, at.head, i, j], n)
                for r in range(TILE):
                    for which, (factors, _) in enumerate(wanted):
                        factor = v.splat(factors[i * CHUNK + tile * TILE + r])
                        v.put1(sums, [which * TILE + r], sums[which * TILE + r] + part * factor)
            for r in range(TILE):
                row = T.Bind(tile * TILE + r)
                for which, (_, out) in enumerate(wanted):
                    v.put1(out, [row], sums[which * TILE + r] * v.splat(powers[row]))
        with T.serial(0, CHUNK) as r:
            v.put1(added, [r], v.splat(0.0))
        at.change(chunk, loaded, j, n, found, added)
        with T.serial(0, CHUNK) as r, T.If(r < count), T.Then():
            sum_ = v.registers(1)
            v.put1(sum_, [0], seen[r])
            with T.serial(0, r + 1) as i:
                v.put1(sum_, [0], sum_[0] + added[i] * v.splat(by_query[r * CHUNK + i]))
            beside = at.skipped(m + r, j, n)
            out = sum_[0] if beside is None else sum_[0] + beside
            v.put_some(buf["out"], [m + r, at.first + j], out, n)
        moved = v.registers(CHUNK)
        for r in range(CHUNK):
            v.put1(moved, [r], added[r] * v.splat(last[r]))
        with T.serial(0, depth) as i:
            after = v.registers(1)
            v.put1(after, [0], v.some(state, [page, at.head, i, j], n) * end)
            for r in range(CHUNK):
                v.put1(after, [0], after[0] + moved[r] * v.splat(keys[i * CHUNK + r]))
            v.put_some(state, [page, at.head, i, j], after[0], n)

    _each(at, columns)


def products(chunk: ChunkRows, factors: Expr) -> Expr:
    """[r, i]: e^(G_r − G_i) · factors_r·k_i for i ≤ r; other elements have no meaning."""
    out = v.local((CHUNK * CHUNK,), "float32")
    (size,) = chunk.keys.shape
    with T.serial(0, CHUNK // TILE) as tile:
        sums = v.registers(TILE)
        for r in range(TILE):
            v.put1(sums, [r], v.splat(0.0))
        with T.serial(0, int(size) // CHUNK) as i:
            key = v.lanes(chunk.keys, [i * CHUNK])
            for r in range(TILE):
                v.put1(sums, [r], sums[r] + key * v.splat(factors[i * CHUNK + tile * TILE + r]))
        for r in range(TILE):
            row = T.Bind(tile * TILE + r)
            shrunk = v.exp(v.splat(chunk.grown[row]) - v.lanes(chunk.grown, [0]))
            v.put(out, [row * CHUNK], sums[r] * shrunk)
    return out
