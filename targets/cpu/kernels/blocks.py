"""A block of positions in attention: scores, their softmax, and the weighted sum of values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.jobs import Attend
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.activations import softcap
from nearfar.targets.cpu.kernels.half import load
from nearfar.targets.cpu.kernels.quantized_kv import PageLayout, key_vectors, value_vector
from nearfar.targets.cpu.units import Unit

Expr = Any
Buffers = dict[str, Expr]
NONE = -1e30  # used for -inf in arithmetic
BLOCK = 128
"""Positions in a block: sums are rescaled once for each, and a task computes at least one of a long
sequence.
"""
AT_ONCE = 4  # the most pages: they make more chains of sums than any processor can overlap


@dataclass(frozen=True)
class Queries:
    """The queries of one key head for `rows` successive rows of a sequence, row by row.

    `m`: the first row; `position`: its position. `tile` queries go through the cache together, `pages` pages
    at a time.
    """

    job: Attend
    unit: Unit
    m: Expr
    kv_head: Expr
    rows: int
    slot: Expr
    position: Expr
    first: Expr
    """The first position that the first row sees."""
    first_block: Expr
    tile: int
    pages: int

    @classmethod
    def of(cls, job: Attend, unit: Unit, buf: Buffers, m: Expr, kv_head: Expr, rows: int) -> Queries:
        """The queries of rows m … m+rows−1 for one key head."""
        position, slot = T.Bind(buf["positions"][m]), T.Bind(buf["slots"][m])
        first = v.i32(0) if job.window is None else T.Bind(tirx.max(position + 1 - job.window, 0))
        tile = _tile(unit, job.heads // job.kv_heads, rows, job.page_size)
        pages = next(n for n in (AT_ONCE, 2, 1) if n == 1 or _fits(unit, tile, n, job.page_size))
        return cls(job, unit, m, kv_head, rows, slot, position, first, T.Bind(first // BLOCK), tile, pages)

    @property
    def group(self) -> int:
        """The number of query heads that share the key head."""
        return self.job.heads // self.job.kv_heads

    @property
    def count(self) -> int:
        """The number of queries."""
        return self.rows * self.group

    @property
    def last(self) -> Expr:
        """The position of the last row."""
        return self.position + (self.rows - 1)

    @property
    def blocks(self) -> Expr:
        """The number of blocks that the queries see; 0 for a padding row."""
        return T.Bind((self.last + BLOCK) // BLOCK - self.first_block)

    def row(self, q: Expr) -> Expr:
        """The row of query `q`."""
        return self.m if self.rows == 1 else T.Bind(self.m + q // self.group)

    def head(self, q: Expr) -> Expr:
        """The head of query `q`."""
        return T.Bind(self.kv_head * self.group + (q if self.rows == 1 else q % self.group))

    def weights(self) -> Expr:
        """An array for a tile's scores in a block; it is a little longer so that rows do not share cache
        sets.
        """
        return v.local((self.tile, BLOCK + self.pages * self.job.page_size), "float32")


def _fits(unit: Unit, tile: int, pages: int, page_size: int) -> bool:
    """Whether the sums of scores, the keys and a component of a query have a register each."""
    vectors = pages * page_size // unit.lanes
    return (tile + 1) * vectors + 1 <= unit.registers


def _tile(unit: Unit, group: int, rows: int, page_size: int) -> int:
    """The number of queries that read a page together: all queries of some rows, or a part of each row's."""
    most = max(1, (unit.registers - 2) * unit.lanes // page_size)
    if group > most:
        return next(tile for tile in range(most, 0, -1) if group % tile == 0)
    return group * next(n for n in (8, 4, 2, 1) if rows % n == 0 and (n * group <= most or n == 1))


@dataclass(frozen=True)
class Running:
    """The softmax of some queries over the blocks so far.

    `acc` [count, head_dim]: Σ weight·value, relative to the maximum `top` [count]; `total` [count]: Σ weight.
    """

    acc: Expr
    top: Expr
    total: Expr
    head_dim: int

    @classmethod
    def local(cls, count: int, head_dim: int) -> Running:
        """A running softmax in arrays on the stack."""
        acc, top, total = (v.local(shape, "float32") for shape in ((count, head_dim), (count,), (count,)))
        return cls(acc, top, total, head_dim)

    def join(self, q: Expr, top: Expr, total: Expr) -> tuple[Expr, Expr]:
        """Merge a block's maximum and sum of weights; return the factors for the old sums and for the
        block's.
        """
        own = T.Bind(self.top[q])
        less = T.Bind(tirx.min(own, top) - tirx.max(own, top))
        shrink = T.Bind(tirx.Shuffle([v.exp(v.splat(less))], [0]))
        old = T.Bind(tirx.Select(own >= top, v.f32(1.0), shrink))
        new = T.Bind(tirx.Select(own >= top, shrink, v.f32(1.0)))
        v.put1(self.total, [q], self.total[q] * old + total * new)
        v.put1(self.top, [q], T.Bind(tirx.max(own, top)))
        return old, new

    def add(self, q: Expr, at: Expr, n: int, old: Expr, value: Expr, new: Expr) -> None:
        """Merge n components, from `at` on, of a block's weighted values."""
        kept = v.lanes(self.acc, [q, at], n) * v.splat(old, n)
        v.put(self.acc, [q, at], kept + value * v.splat(new, n), n)

    def finish(self, out: Expr, m: Expr, head: Expr, q: Expr) -> None:
        """Write a query's attention to `out`."""
        total = T.Bind(self.total[q])
        inverse = T.Bind(tirx.Select(total > v.f32(0.0), v.f32(1.0) / total, v.f32(0.0)))

        def put(at: Expr, n: int) -> None:
            value = v.lanes(self.acc, [q, at], n) * v.splat(inverse, n)
            v.put(out, [m, head * self.head_dim + at], value, n)

        v.components(self.head_dim, put)


def start(job: Attend, buf: Buffers, running: Running, q: Expr, head: Expr) -> None:
    """Initialize a query's softmax. A sink is a logit that counts as already summed."""
    v.components(job.head_dim, lambda at, n: v.put(running.acc, [q, at], v.splat(0.0, n), n))
    v.put1(running.top, [q], tirx.max(buf["sinks"][head], v.f32(NONE)) if job.sinks else v.f32(NONE))
    v.put1(running.total, [q], v.f32(1.0 if job.sinks else 0.0))


Join = Callable[[Expr, Expr, Expr], None]
Keep = Callable[[int, Expr, int, Expr], None]


def block_of(
    job: Attend, buf: Buffers, queries: Queries, q: Expr, block: Expr, weights: Expr, join: Join, keep: Keep
) -> None:
    """Compute a block for queries q … q+tile−1.

    Calls join(j, maximum, sum of weights) for each query, then keep(j, first component, number of components,
    Σ weight·value).
    """
    size = job.page_size
    column = T.Bind(block * (BLOCK // size))
    begin = T.Bind(tirx.max(queries.first - block * BLOCK, 0)) if job.window is not None else v.i32(0)
    end = T.Bind(tirx.min(queries.last + 1 - block * BLOCK, BLOCK))
    span = _Span(column, begin, end, T.Bind(begin // size), T.Bind((end + size - 1) // size))
    turns = T.Bind((span.stop - span.start + queries.pages - 1) // queries.pages)
    with T.serial(0, turns) as turn:
        _scores(job, buf, queries, q, span, T.Bind(span.start + turn * queries.pages), weights)
    with T.serial(0, queries.tile) as j:
        position = queries.position if queries.rows == 1 else queries.position + (q + j) // queries.group
        seen = T.Bind(position + 1 - block * BLOCK)
        _softmax(job, weights, j, seen, span, functools.partial(join, j))
    vectors, unit = job.head_dim // v.LANES, queries.unit
    most = max(1, (unit.registers - 1) * unit.lanes // (v.LANES * (queries.tile + 1)))
    each = next((n for n in range(most, 0, -1) if vectors % n == 0), 1)
    with T.serial(0, vectors // each) as some:
        pieces = [((some * each + i) * v.LANES, v.LANES) for i in range(each)]
        _values(job, buf, queries, q, block, span, weights, pieces, keep)
    if rest := v.rest(job.head_dim):
        _values(job, buf, queries, q, block, span, weights, rest, keep)


@dataclass(frozen=True)
class _Span:
    """The part of a block that some row sees: positions begin … end, on pages start … stop.

    Positions and pages count from the block's beginning; `column`: the page table's column where the block
    begins.
    """

    column: Expr
    begin: Expr
    end: Expr
    start: Expr
    stop: Expr


def _scores(
    job: Attend, buf: Buffers, queries: Queries, q: Expr, span: _Span, first: Expr, weights: Expr
) -> None:
    """q·k for a tile of queries and the positions of queries.pages pages from `first` on; undefined past the
    last page.
    """
    each, tile, d, size = job.page_size // v.LANES, queries.tile, job.head_dim, job.page_size
    columns = [T.Bind(span.column + tirx.min(first + i, span.stop - 1)) for i in range(queries.pages)]
    pages = [T.Bind(buf["page_table"][queries.slot, column]) for column in columns]
    # A long cache is in slow memory: prefetch it. With many rows the prefetches cost little in comparison.
    ahead = tirx.max(v.i32(0), queries.last // size - span.column)
    soon = [
        T.Bind(buf["page_table"][queries.slot, span.column + tirx.min(first + i + BLOCK // size, ahead)])
        for i in range(queries.pages)
    ]
    row, head = queries.row(q), queries.head(q)
    s = v.registers(tile * len(pages) * each)
    for i in range(tile * len(pages) * each):
        v.put1(s, [i], v.splat(0.0))

    def add(c: Expr, keys: list[Expr]) -> None:
        for j in range(tile):
            at = (row + j // queries.group, (head + j % queries.group) * d + c)
            component = T.Bind(v.splat(buf["q"][at]))
            for i, key in enumerate(keys, j * len(keys)):
                v.put1(s, [i], s[i] + component * key)

    def fetch(values: Expr, keys: Expr, value_at: list[Expr], key_at: list[Expr]) -> None:
        if queries.rows == 1:
            for page, later in zip(pages, soon, strict=True):
                v.prefetch(values, [page, queries.kv_head, *value_at])
                v.prefetch(keys, [later, queries.kv_head, *key_at])

    if layout := PageLayout.of(job, queries.unit):
        at = [(page, queries.kv_head, i * v.LANES) for page in pages for i in range(each)]
        (values, _), (keys, _) = buf["values"], buf["keys"]
        key_vectors(layout, buf["keys"], at, lambda byte: fetch(values, keys, [byte], [byte]), add)
    else:
        with T.serial(0, d) as c:
            loaded = [
                load(queries.unit, buf["keys"], job.kv_dtype, [page, queries.kv_head, c, i * v.LANES])
                for page in pages
                for i in range(each)
            ]
            fetch(buf["values"], buf["keys"], [v.i32(0), c * size], [c, v.i32(0)])
            add(c, loaded)
    for j in range(tile):
        for i in range(len(pages) * each):
            v.put(weights, [j, first * size + i * v.LANES], T.Bind(s[j * len(pages) * each + i]))


def _softmax(
    job: Attend, weights: Expr, j: Expr, seen: Expr, span: _Span, join: Callable[[Expr, Expr], None]
) -> None:
    """Turn a query's scores into weights; positions that it does not see, or before `seen`, get weight 0."""
    largest, added, per_page = v.registers(1), v.registers(1), job.page_size // v.LANES
    v.put1(largest, [0], v.splat(NONE))
    v.put1(added, [0], v.splat(0.0))
    count = T.Bind((span.stop - span.start) * per_page)
    with T.serial(0, count) as turn:
        at = T.Bind((span.start * per_page + turn) * v.LANES)
        score = T.Bind(v.lanes(weights, [j, at]) * v.splat(float(job.scale)))
        if job.softcap is not None:
            score = softcap(score, job.softcap)
        index = tirx.Ramp(at, v.i32(1), v.LANES)
        inside = index < v.splat(seen)
        if job.window is not None:
            inside = tirx.all(inside, index >= v.splat(seen - job.window))
        score = v.keep(tirx.Select(inside, score, v.splat(NONE)))
        v.put(weights, [j, at], score)
        v.put1(largest, [0], tirx.max(largest[0], score))
    top = T.Bind(v.hmax(T.Bind(largest[0])))
    with T.serial(0, count) as turn:
        at = T.Bind((span.start * per_page + turn) * v.LANES)
        score = v.lanes(weights, [j, at])
        # If the query sees nothing, top is NONE, too.
        weight = tirx.Select(score > v.splat(NONE / 2), v.exp(score - v.splat(top)), v.splat(0.0))
        weight = v.keep(weight)
        v.put(weights, [j, at], weight)
        v.put1(added, [0], added[0] + weight)
    join(top, v.hsum(T.Bind(added[0])))


def _values(
    job: Attend, buf: Buffers, queries: Queries, q: Expr, block: Expr, span: _Span, weights: Expr,
    pieces: list[tuple[Expr, int]], keep: Keep,
) -> None:  # fmt: skip
    """Σ weight·value over a block, for some components of a tile's queries."""
    size, tile, layout = job.page_size, queries.tile, PageLayout.of(job, queries.unit)
    sums = [[v.registers(1, f"float32x{n}") for _ in range(tile)] for _, n in pieces]
    for own, (_, n) in zip(sums, pieces, strict=True):
        for register in own:
            v.put1(register, [0], v.splat(0.0, n))

    def add(page: Expr, at: Expr, t: Expr, *, guarded: bool) -> None:
        each = [T.Bind(weights[j, at + t]) for j in range(tile)]
        for own, (first, n) in zip(sums, pieces, strict=True):
            value = (
                load(queries.unit, buf["values"], job.kv_dtype, [page, queries.kv_head, t, first], n)
                if layout is None
                else value_vector(layout, buf["values"], page, queries.kv_head, t, first)
            )
            value = T.Bind(value)
            for register, weight in zip(own, each, strict=True):
                one = value
                if guarded:
                    unseen = tirx.EQ(v.splat(weight, n), v.splat(0.0, n))
                    one = tirx.Select(unseen, v.splat(0.0, n), value)
                v.put1(register, [0], register[0] + v.splat(weight, n) * one)

    with T.serial(0, span.stop - span.start) as turn:
        column = T.Bind(span.start + turn)
        at = T.Bind(column * size)
        page = T.Bind(buf["page_table"][queries.slot, span.column + column])
        low, high = T.Bind(tirx.max(span.begin - at, 0)), T.Bind(tirx.min(span.end - at, size))
        if queries.rows == 1:
            with T.serial(0, high - low) as t:
                add(page, at, T.Bind(low + t), guarded=False)
        else:
            # Values that a row does not see, even NaN, must not reach it in a page that other rows see.
            every = at + size <= queries.position + 1 - block * BLOCK
            if job.window is not None:
                every = tirx.all(every, at + block * BLOCK > queries.last - job.window)
            with T.If(every):
                with T.Then(), T.serial(0, size) as t:
                    add(page, at, t, guarded=False)
                with T.Else(), T.serial(0, high - low) as t:
                    add(page, at, T.Bind(low + t), guarded=True)
    for own, (first, n) in zip(sums, pieces, strict=True):
        for j, register in enumerate(own):
            keep(j, first, n, T.Bind(register[0]))
