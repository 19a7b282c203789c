"""The kernel that computes, once a step, the facts about rows that the projections to q, k and v need: see
jobs.Rows.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: SIM102
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Rows
from nearfar.targets.gpu.kernels.common import ceil_div, f32, select
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, at, spread

THREADS = 64
PLACE, FACTOR = 0, 1
"""Indices of these facts in a row; the others of Rows.FACTS are zeros, so that the cosines begin at a whole
vector.
"""


def turn(pair, r, turned, rows, row, lane, half: int) -> None:
    """Rotate pair[2r] and pair[2r + 1], vector `lane` of each half of a head, by the row's position.

    A half has `half` vectors; `turned`: two vectors to work in.
    """
    place = Rows.FACTS // WIDTH + lane
    cos, sin = (T.reinterpret("float32x4", rows[row, place + side * half]) for side in range(2))
    T.buffer_store(turned, pair[r * 2] * cos - pair[r * 2 + 1] * sin, [0])
    T.buffer_store(turned, pair[r * 2 + 1] * cos + pair[r * 2] * sin, [1])
    for side in range(2):
        T.buffer_store(pair, turned[side], [r * 2 + side])


def factor(rows, row):
    """The factor of the row's q, as a vector."""
    return spread(T.reinterpret("float32", at(rows[row, 0], FACTOR)))


def rows(job: Rows) -> Staged:
    """The launch of a Rows job, with a thread for each number."""
    names = (*job.inputs(), "out")
    return Staged((Stage(select(_facts(job), list(names), "rows"), names),))


def _facts(job: Rows) -> tirx.PrimFunc:
    width = job.FACTS + job.head_dim
    beta, original = job.q_scale or (0.0, 1.0)

    @prim_func
    def kernel(
        positions: T.Buffer((MAX_STEP,), "int32"),
        slots: T.Buffer((MAX_STEP,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        rope_h: T.handle,
        out: T.Buffer((job.m, width), "int32"),
    ):
        context = T.int32()
        rope = T.match_buffer(rope_h, (context, max(job.head_dim, 1)), "float32")
        for bx in T.thread_binding(ceil_div(width, THREADS), thread="blockIdx.x"):
            for by in T.thread_binding(job.m, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    fact = T.alloc_local((1,), "int32")
                    column: T.let = bx * THREADS + tx
                    position: T.let = positions[by]
                    if column < width:
                        fact[0] = 0
                        if column == PLACE:
                            fact[0] = -1
                            if job.append:
                                if position >= 0:
                                    fact[0] = (
                                        page_table[slots[by], position // job.page_size] * job.page_size
                                        + position % job.page_size
                                    )
                        if column == FACTOR:
                            fact[0] = T.reinterpret("int32", T.float32(1))
                            if job.q_scale is not None:
                                fact[0] = T.reinterpret(
                                    "int32",
                                    T.float32(1)
                                    + T.float32(beta) * T.log(f32(1 + T.max(position, 0) // int(original))),
                                )
                        if job.head_dim > 0:
                            if column >= job.FACTS:
                                fact[0] = T.reinterpret("int32", rope[T.max(position, 0), column - job.FACTS])
                        out[by, column] = fact[0]

    return kernel
