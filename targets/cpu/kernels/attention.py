"""Paged attention with a running softmax, one block of positions at a time.

A task has the query heads of one key head, for one row or for several successive rows of a sequence. As many
of these queries as fit in registers go through the cache together, so that a key or value is loaded, and
converted from float16, once for all of them. Each block has its own softmax, which is then merged with that
of the blocks before it. So results are equal bit by bit whether one task takes all blocks of a row, or of
several rows, or several tasks share the blocks.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Attend
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.blocks import BLOCK, Queries, Running, block_of, start
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.paged import arguments, caches, check
from nearfar.targets.cpu.units import Unit

Expr = Any
Buffers = dict[str, Expr]
TASKS = 32
"""The least number of tasks that a launch should have, for processors with many threads and for an
even load.
"""
SHARES = 16
"""Tasks that share the positions of a row and key head if rows alone make too few tasks."""
ROWS = 8
"""The most rows of a task, so that their sums stay in the nearest cache."""
STATE = 8192
"""The most numbers in a task's sums: 32 KiB of its stack."""


def attention(job: Attend, unit: Unit) -> Staged:
    """The launches of an Attend job."""
    check(job)
    shared, rows = job.m * job.kv_heads < SHARES, _rows_of_task(job)
    scratch = _scratch(job) if shared else ()
    job = opened(job)
    args, pages = arguments(job)
    named = [
        (f"scratch:{i}", shape, dtype) for i, (shape, dtype) in enumerate(_scratch(job) if shared else ())
    ]
    args = [*args[:-1], *named, args[-1]]

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        buf |= caches(job, unit, buf, pages)
        if shared:
            _shared(job, unit, buf)
        else:
            _whole(job, unit, buf, rows)

    func = v.prim_func(
        "attention", [(name.replace(":", "_"), shape, dtype) for name, shape, dtype in args], body
    )
    return Staged((Stage(func, tuple(name for name, *_ in args)),), scratch)


def _scratch(job: Attend) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of the partial results of shared rows: the blocks' sums; their maxima and sums of
    weights.
    """
    parts = (job.m, job.heads, _parts(job))
    return ((*parts, job.head_dim), "float32"), ((*parts, 2), "float32")


def _rows_of_task(job: Attend) -> int:
    """Rows in each task: as many as leave enough tasks."""
    state = job.heads // job.kv_heads * job.head_dim
    return next(
        rows
        for rows in (ROWS, ROWS // 2, ROWS // 4, 1)
        if rows == 1
        or (job.m % rows == 0 and job.m // rows * job.kv_heads >= TASKS and rows * state <= STATE)
    )


def _whole(job: Attend, unit: Unit, buf: Buffers, rows: int) -> None:
    """Attention in which each task computes all positions of its rows."""
    with v.parallel(job.m // rows * job.kv_heads) as task:
        m, kv_head = T.Bind(task // job.kv_heads * rows), T.Bind(task % job.kv_heads)
        if rows == 1:
            _sequence(job, unit, buf, m, kv_head, 1)
            return
        follow = buf["positions"][m] >= 0
        for r in range(1, rows):
            follow = tirx.all(
                follow, tirx.EQ(buf["slots"][m + r], buf["slots"][m]),
                tirx.EQ(buf["positions"][m + r], buf["positions"][m] + r),
            )  # fmt: skip
        with T.If(follow):
            with T.Then():
                _sequence(job, unit, buf, m, kv_head, rows)
            with T.Else(), T.serial(0, rows) as r:
                _sequence(job, unit, buf, T.Bind(m + r), kv_head, 1)


def _sequence(job: Attend, unit: Unit, buf: Buffers, m: Expr, kv_head: Expr, rows: int) -> None:
    """Attention over all blocks for rows m … m+rows−1, which follow each other in a sequence."""
    queries = Queries.of(job, unit, buf, m, kv_head, rows)
    running = Running.local(queries.count, job.head_dim)
    with T.serial(0, queries.count) as q:
        start(job, buf, running, q, queries.head(q))
    weights = queries.weights()
    with T.serial(0, queries.blocks) as turn:
        block = T.Bind(queries.first_block + turn)
        with T.serial(0, queries.count // queries.tile) as some:
            factors = v.local((queries.tile, 2), "float32")

            def join(j: Expr, top: Expr, total: Expr) -> None:
                old, new = running.join(T.Bind(some * queries.tile + j), top, total)
                v.put1(factors, [j, 0], old)
                v.put1(factors, [j, 1], new)

            def keep(j: int, at: Expr, n: int, value: Expr) -> None:
                running.add(
                    some * queries.tile + j, at, n, T.Bind(factors[j, 0]), value, T.Bind(factors[j, 1])
                )

            block_of(job, buf, queries, T.Bind(some * queries.tile), block, weights, join, keep)
    with T.serial(0, queries.count) as q:
        running.finish(buf["out"], queries.row(q), queries.head(q), q)


def _parts(job: Attend) -> int:
    """The most blocks that a row can see."""
    every = -(-job.pages_per_slot * job.page_size // BLOCK)
    return every if job.window is None else min(every, -(-job.window // BLOCK) + 1)


def _shared(job: Attend, unit: Unit, buf: Buffers) -> None:
    """Attention in which several tasks share the blocks of a row and key head; their results are then merged
    in order.
    """
    sums, tops, group = buf["scratch:0"], buf["scratch:1"], job.heads // job.kv_heads
    with v.parallel(job.m * job.kv_heads * SHARES) as task:
        pair, share = T.Bind(task // SHARES), T.Bind(task % SHARES)
        m, kv_head = T.Bind(pair // job.kv_heads), T.Bind(pair % job.kv_heads)
        queries = Queries.of(job, unit, buf, m, kv_head, 1)
        weights = queries.weights()
        first = T.Bind(share * queries.blocks // SHARES)
        with T.serial(0, (share + 1) * queries.blocks // SHARES - first) as turn:
            part = T.Bind(first + turn)
            with T.serial(0, group // queries.tile) as some:
                head = T.Bind(kv_head * group + some * queries.tile)

                def join(j: Expr, top: Expr, total: Expr) -> None:
                    v.put1(tops, [m, head + j, part, 0], top)
                    v.put1(tops, [m, head + j, part, 1], total)

                def keep(j: int, at: Expr, n: int, value: Expr) -> None:
                    v.put(sums, [m, head + j, part, at], value, n)

                block = T.Bind(queries.first_block + part)
                block_of(job, buf, queries, T.Bind(some * queries.tile), block, weights, join, keep)
    running = Running.local(1, job.head_dim)
    with T.serial(0, job.m * job.heads) as pair:
        m, head = T.Bind(pair // job.heads), T.Bind(pair % job.heads)
        queries = Queries.of(job, unit, buf, m, T.Bind(head // group), 1)
        start(job, buf, running, v.i32(0), head)
        with T.serial(0, queries.blocks) as part:
            top, total = T.Bind(tops[m, head, part, 0]), T.Bind(tops[m, head, part, 1])
            old, new = running.join(v.i32(0), top, total)
            v.components(
                job.head_dim,
                lambda at, n: running.add(v.i32(0), at, n, old, v.lanes(sums, [m, head, part, at], n), new),
            )
        running.finish(buf["out"], m, head, v.i32(0))
