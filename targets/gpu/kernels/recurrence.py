"""The states of a recurrence in one launch: a workgroup has some columns of a head's state, and takes the
rows in order.

Each thread keeps a part of a column in registers: LANES threads share one. So a step reads and writes a state
once, however many rows there are, and a row costs one barrier. On a software GPU a barrier costs
more than the products: there, in steps of many rows, a thread has a whole column, and there is no barrier
(256 rows in lavapipe: 0.4 of the time). With S the state before a row, k and q its key and query, g its
decay, β its rate:
    d = β · v                  or, where a rule finds, with k and q of length 1, d = β · (v − g · Sᵀk)
    S ← g · S + k ⊗ d
    out = Sᵀq                  which is g · Sᵀq + (q·k) · d
Of few rows each may begin a sequence: each has workgroups of its own, which take the rows that follow it.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: SIM102
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.kernels.contract import SCRATCH, Stage, Staged
from nearfar.kernels.jobs import Delta, Ssm
from nearfar.targets.gpu.classes import SOFTWARE, Tuning
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.script.text import prim_func

COLUMNS = 32
"""Columns of a workgroup."""
LANES = 4
"""Threads of a column."""
MOST = 32
"""The most values of a column in the registers of a thread; longer columns have twice the threads."""
ALONE = MAX_ROWS
"""The most rows that have workgroups of their own."""
THREADS = 64
"""Threads of a workgroup that computes decays and rates."""


@dataclass(frozen=True)
class RowColumns:
    """Where a row of x has what its heads read: the first columns of keys, queries and values. `key_head`
    gives the head of keys and queries that a head reads, as a number or an expression; `depth`, `width`:
    lengths of a key and of a value.
    """

    keys: int
    queries: int
    values: int
    key_head: Callable[[Any], Any]
    depth: int
    width: int


def recurrence(job: Delta | Ssm, rows: RowColumns, gates: Stage, tuning: Tuning) -> Staged:
    """The launches of a job: `gates`, which makes decays and rates [m, 2·heads] in the scratch array 0, then
    the states. Together they have more than the eight buffers of a kernel.
    """
    lanes = LANES if rows.depth <= LANES * MOST else 2 * LANES
    lanes = 1 if tuning.device is SOFTWARE and job.m > ALONE else lanes
    names = ["x", "gates", "terms", "state", "positions", "slots", "page_table", "out"]
    if isinstance(job, Delta):
        names.remove("terms")
    args = (f"{SCRATCH}0" if name == "gates" else name for name in names)
    states = Stage(select(_states(job, rows, lanes), names, f"{job.kind}_states"), tuple(args))
    return Staged((gates, states), (((job.m, 2 * job.heads), "float32"),))


def _states(job: Delta | Ssm, rows: RowColumns, lanes: int):
    """The kernel with a workgroup for some columns of a head, `lanes` threads for each."""
    m, heads, stride, finds = job.m, job.heads, job.stride, isinstance(job, Delta)
    depth, width, key_head = rows.depth, rows.width, rows.key_head
    part = ceil_div(depth, lanes)  # values of a column that a thread keeps
    ragged = depth % lanes != 0
    columns = min(COLUMNS, width)
    # registers need numbers that are known; software has them in memory anyway
    over = T.unroll if lanes > 1 else T.serial
    blocks, apart, last_row = ceil_div(width, columns), m <= ALONE, m - 1
    # the sums of a thread: S·q, S·k; then those that are the same for all columns: k·k, q·q, q·k
    sums, products = (2, 3) if finds else (1, 0)
    each = 2 * sums * lanes * columns

    def place(row, which, lane, column):
        """Where a lane's sum of a column is, by the parity of rows."""
        return ((row % 2 * sums + which) * lanes + lane) * columns + column

    def alike(row, which, lane):
        """Where a lane's sum for all columns is."""
        return each + (row % 2 * products + which) * lanes + lane

    def there(at):
        """Whether a state has this place in its depth."""
        return at < depth if ragged else True

    @prim_func
    def kernel(
        x: T.Buffer((m, job.x_width), "float32"),
        gates: T.Buffer((m, 2 * heads), "float32"),
        terms: T.Buffer((3 * heads,), "float32"),
        state_h: T.handle,
        positions: T.Buffer((MAX_STEP,), "int32"),
        slots: T.Buffer((MAX_STEP,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        out: T.Buffer((m, heads * width), "float32"),
    ):
        pages = T.int32()
        state = T.match_buffer(state_h, (pages, heads, depth, width), "float32")
        for bx in T.thread_binding(heads * blocks, thread="blockIdx.x"):
            for by in T.thread_binding(m if apart else 1, thread="blockIdx.y"):
                for tx in T.thread_binding(columns * lanes, thread="threadIdx.x"):
                    found = T.alloc_shared((each + 2 * products * lanes,), "float32")
                    kept = T.alloc_local((part,), "float32")
                    own = T.alloc_local((sums + products,), "float32")
                    value = T.alloc_local((5,), "float32")
                    at = T.alloc_local((5,), "int32")  # first row, row behind the last, position, slot, page
                    head: T.let = bx // blocks
                    column: T.let = T.min(bx % blocks * columns + tx % columns, width - 1)
                    writes: T.let = bx % blocks * columns + tx % columns < width
                    lane: T.let = tx // columns
                    query: T.let = rows.queries + key_head(head) * depth + lane * part
                    key: T.let = rows.keys + key_head(head) * depth + lane * part
                    at[0] = 0
                    at[1] = m
                    if apart:
                        at[0] = by
                        at[1] = by + 1
                        at[4] = T.max(by - 1, 0)
                        if by > 0 and positions[by] > 0:
                            if slots[at[4]] == slots[by] and positions[at[4]] == positions[by] - 1:
                                at[1] = by  # the workgroups of a row before it take this row
                        if at[1] > by and positions[by] >= 0:
                            for r in T.serial(1, m):
                                at[4] = T.min(by + r, last_row)
                                if at[1] == by + r and by + r < m:
                                    if slots[at[4]] == slots[by] and positions[at[4]] == positions[by] + r:
                                        at[1] = at[1] + 1
                    for row in T.serial(m):
                        at[2] = positions[row]
                        at[3] = slots[row]
                        if row >= at[0] and row < at[1] and at[2] >= 0:
                            at[4] = T.max(row - 1, 0)
                            if row == at[0] or slots[at[4]] != at[3] or positions[at[4]] != at[2] - 1:
                                at[4] = page_table[at[3], T.max(at[2] - 1, 0) // stride]
                                for i in over(part):
                                    kept[i] = T.float32(0)
                                    if there(lane * part + i) and at[2] > 0:
                                        kept[i] = state[at[4], head, lane * part + i, column]
                            for i in T.unroll(sums + products):
                                own[i] = T.float32(0)
                            if not finds:
                                value[2] = gates[row, head]
                                value[3] = x[row, rows.values + head * width + column]
                                value[3] = gates[row, heads + head] * value[3]
                            for i in over(part):
                                if there(lane * part + i):
                                    value[0] = x[row, key + i]
                                    value[1] = x[row, query + i]
                                    if not finds:
                                        kept[i] = value[2] * kept[i] + value[0] * value[3]
                                    own[0] = own[0] + kept[i] * value[1]
                                    if finds:
                                        own[1] = own[1] + kept[i] * value[0]
                                        own[2] = own[2] + value[0] * value[0]
                                        own[3] = own[3] + value[1] * value[1]
                                        own[4] = own[4] + value[0] * value[1]
                            if lanes > 1:
                                for i in T.unroll(sums):
                                    found[place(row, i, lane, tx % columns)] = own[i]
                                if finds and tx % columns == 0:
                                    for i in T.unroll(products):
                                        found[alike(row, i, lane)] = own[sums + i]
                        if lanes > 1:
                            T.tvm_storage_sync("shared")
                        if row >= at[0] and row < at[1]:
                            if at[2] < 0:
                                if lane == 0 and writes:
                                    out[row, head * width + column] = T.float32(0)
                            else:
                                if lanes > 1:
                                    for i in T.unroll(sums + products):
                                        own[i] = T.float32(0)
                                    for e in T.unroll(lanes):
                                        for i in T.unroll(sums):
                                            own[i] = own[i] + found[place(row, i, e, tx % columns)]
                                        if finds:
                                            for i in T.unroll(products):
                                                own[sums + i] = own[sums + i] + found[alike(row, i, e)]
                                if not finds:
                                    if lane == 0 and writes:
                                        value[4] = x[row, rows.values + head * width + column]
                                        value[4] = own[0] + terms[2 * heads + head] * value[4]
                                        out[row, head * width + column] = value[4]
                                else:
                                    value[0] = T.rsqrt(own[2] + T.float32(job.eps))  # 1 / length of k
                                    value[1] = T.rsqrt(own[3] + T.float32(job.eps))  # 1 / length of q
                                    value[2] = gates[row, head]  # the decay
                                    value[3] = x[row, rows.values + head * width + column]
                                    value[3] = value[3] - value[2] * own[1] * value[0]
                                    # what is added along k as it is in x
                                    value[3] = gates[row, heads + head] * value[3] * value[0]
                                    if lane == 0 and writes:
                                        value[4] = value[2] * own[0] + own[4] * value[3]
                                        value[4] = value[4] * value[1] * T.float32(depth**-0.5)
                                        out[row, head * width + column] = value[4]
                                    for i in over(part):
                                        if there(lane * part + i):
                                            kept[i] = value[2] * kept[i] + x[row, key + i] * value[3]
                                at[4] = T.min(row + 1, last_row)
                                if (
                                    row + 1 == at[1]
                                    or slots[at[4]] != at[3]
                                    or positions[at[4]] != at[2] + 1
                                    or (at[2] + 1) % stride == 0
                                ):
                                    at[4] = page_table[at[3], at[2] // stride]
                                    for i in over(part):
                                        if there(lane * part + i) and writes:
                                            state[at[4], head, lane * part + i, column] = kept[i]

    return kernel
