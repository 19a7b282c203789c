"""Attention for few rows: workgroups divide the positions that a row sees into runs of blocks.

A row gets as many workgroups as the longest sequence needs, at most `workgroups` in all; they take equal runs
of the blocks that exist now, and workgroups beyond the sequence return at once. Lengths are read from
read-only buffers at uniform indices, so control flow is uniform, as WGSL demands around barriers. A second
launch weighs the parts that exist, again by the length, or the matmul behind it does (combine.py; Dao et al.,
"Flash-Decoding for long-context inference", 2023).

A workgroup has the query heads that share one kv head, so a key or value loaded serves them all. Scores: a
few neighbouring lanes read a key as vectors, so that they read whole lines; their sums meet in workgroup
memory. Values: lanes are spread along the head, stripes of them along the positions, and are summed at the
end.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: SIM102
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.kv import row_bytes
from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Attend, Split
from nearfar.targets.gpu.classes import SHARED_BYTES, DeviceClass
from nearfar.targets.gpu.kernels.activations import capped
from nearfar.targets.gpu.kernels.attention.cached import Cached
from nearfar.targets.gpu.kernels.attention.combine import combine, span_of
from nearfar.targets.gpu.kernels.attention.heads import HeadVectors, begin, heads_together, seen
from nearfar.targets.gpu.kernels.common import LOWEST, ceil_div, leading, select
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import of_numbers

MAX_THREADS = 128  # the most threads of a workgroup; a block of 64 positions has no work for more
MAX_HEADS = 8  # query heads of a workgroup
MAX_SUMS = 32  # sums of values that a thread keeps
LANES = 8  # neighbouring threads that read a key: a line of 128 bytes of float32
CELL = 8  # scores whose maximum one thread finds
WORKGROUPS = 1024  # workgroups for all rows, heads and parts: enough for the largest device
MIN_PARTS, MAX_PARTS = 16, 128  # parts of a row; each block is a part of its own if there are not more
MAX_FEW = 32  # the most parts of a row if a matmul joins them
NAMES = ("q", "k_cache", "v_cache", "positions", "slots", "page_table")


@dataclass(frozen=True)
class WorkgroupShape:
    """The layout of a workgroup.

    It has `heads` query heads. Scores of `turn` positions are summed at a time, from the sums of `lanes`
    lanes for each position. Values: `stripes` of lanes; a lane has `cells` vectors of each head. `ahead`:
    loads of a key that the code issues together, or twice as many for all keys. `together`: heads whose
    values are summed at a time.
    """

    threads: int
    block: int
    heads: int
    turn: int
    lanes: int
    stripes: int
    cells: int
    ahead: int

    @property
    def pool(self) -> int:
        """Floats of workgroup memory in which lanes' and stripes' sums meet; a gap after each position avoids
        bank conflicts.
        """
        return self.turn * self.heads * (self.lanes + 1)

    def together(self, dim: int) -> int:
        """The number of heads whose values fit the pool."""
        fit = max(self.pool // (self.stripes * dim), 1)
        return next(size for size in range(min(fit, self.heads), 0, -1) if self.heads % size == 0)

    def pool_of(self, dim: int) -> int:
        """Floats of the pool, with room for at least one head's values."""
        return max(self.pool, self.stripes * self.together(dim) * dim)

    def shared_bytes(self, dim: int) -> int:
        """Bytes of workgroup memory: q, pool, weights, cells, maxima and factors, stripes' sums, places."""
        each = dim + self.block + self.block // CELL + 2 + self.stripes
        return 4 * (self.heads * each + self.pool_of(dim) + self.block)


def shape_of(job: Attend, device: DeviceClass) -> WorkgroupShape:
    """The layout with the most heads that registers and workgroup memory hold, then with the fewest turns."""
    head = HeadVectors.of(job)
    threads, block = min(device.threads, MAX_THREADS), device.positions
    cells, stripes = ceil_div(head.count, threads), max(threads // head.count, 1)
    lanes = math.gcd(head.count, LANES)
    most = max(min(MAX_HEADS, MAX_SUMS // (cells * head.width)), 1)
    turns = block, block // 2, block // 4
    for memory, heads, turn in product((device.shared_bytes, SHARED_BYTES), heads_together(job, most), turns):
        shape = WorkgroupShape(threads, block, heads, turn, lanes, stripes, cells, device.queries // 4)
        if shape.shared_bytes(job.head_dim) <= memory:
            return shape
    raise AssertionError(f"a head of {job.head_dim} does not fit workgroup memory")


def split_of(job: Attend, device: DeviceClass) -> Split:
    """The most parts of a row's positions: blocks, or fewer to keep the grid and the scratch small."""
    shape = shape_of(job, device)
    rows = job.m * job.heads // shape.heads
    most = max(MIN_PARTS, min(MAX_PARTS, WORKGROUPS // rows))
    return Split(min(ceil_div(seen(job), shape.block), most), shape.block, job.window, job.sinks)


def few_parts(job: Attend, device: DeviceClass) -> Split:
    """The fewest parts with half of the bytes in flight that the class requires: each workgroup of the matmul
    that joins the parts reads all of them.
    """
    shape = shape_of(job, device)
    part = job.m * job.heads // shape.heads * shape.block * row_bytes(job.head_dim, job.kv_dtype)
    wanted = max(MIN_PARTS, min(MAX_FEW, ceil_div(device.in_flight // 2, part)))
    whole = split_of(job, device)
    return replace(whole, count=min(whole.count, wanted))


def attention(job: Attend, device: DeviceClass) -> Staged:
    """The launches: the parts, and their weighted sum; only the first if the job leaves the parts."""
    shape = shape_of(job, device)
    split = job.split or split_of(job, device)
    made = of_numbers(select(_split(job, shape, split), [*NAMES, "partial"], "attention_split"))
    if job.split is not None:
        return Staged((Stage(made, (*NAMES, "out")),))
    combined = "scratch:0", "positions", *["sinks"] * job.sinks, "out"
    stages = (
        Stage(made, (*NAMES, "scratch:0")),
        Stage(combine(job, split, min(2 * device.threads, 256)), combined),
    )
    return Staged(stages, (((job.m, job.heads, split.count, job.head_dim + Split.TAIL), job.dtype),))


def _split(job: Attend, shape: WorkgroupShape, split: Split) -> tirx.PrimFunc:
    """The kernel for one row and one part of its positions, for some heads, with output as in jobs.Split.

    In workgroup memory a head's values are ordered by dimension within a vector: all vectors' first
    dimensions, then all second ones, ….
    """
    parts = split.count
    m, heads, kv, dim, page = job.m, job.heads, job.kv_heads, job.head_dim, job.page_size
    head_of = HeadVectors.of(job)
    cached = Cached.of(job, head_of)
    width, count = head_of.width, head_of.count
    group, threads, block, turn, lanes = shape.heads, shape.threads, shape.block, shape.turn, shape.lanes
    stripes, cells, together = shape.stripes, shape.cells, shape.together(dim)
    per_kv = heads // kv // group  # workgroups for each kv head
    at_once = min(threads // lanes, turn)  # positions whose keys are read at the same time
    sums = group * cells * width
    ahead = max(size for size in range(1, shape.ahead + 1) if count // lanes % size == 0)  # loads of a key
    turns = T.unroll if count // lanes * (turn // at_once) <= 2 * shape.ahead else T.serial
    whole_head = cells * threads == count or stripes * count == threads

    @prim_func
    def kernel(
        q: T.Buffer((m, heads * count), head_of.dtype(job.dtype)),
        k_h: T.handle,
        v_h: T.handle,
        positions: T.Buffer((MAX_STEP,), "int32"),
        slots: T.Buffer((MAX_STEP,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        partial: T.Buffer((m, heads, parts, count + Split.TAIL // width), head_of.dtype(job.dtype)),
    ):
        pages = T.int32()
        k_cache = T.match_buffer(k_h, cached.extents(pages), cached.dtype)
        v_cache = T.match_buffer(v_h, cached.extents(pages), cached.dtype)
        for bx in T.thread_binding(kv * per_kv * parts, thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(threads, thread="threadIdx.x"):
                    qs = T.alloc_shared((group * count,), head_of.dtype("float32"))
                    pool = T.alloc_shared((shape.pool_of(dim),), "float32")
                    weight = T.alloc_shared((group * block,), "float32")
                    cell = T.alloc_shared((group * block // CELL,), "float32")
                    top = T.alloc_shared((group,), "float32")
                    factor = T.alloc_shared((group,), "float32")
                    striped = T.alloc_shared((stripes * group,), "float32")
                    place = T.alloc_shared((block,), "int32")
                    score = T.alloc_local((group,), "float32")
                    acc = T.alloc_local((sums,), "float32")
                    total = T.alloc_local((group,), "float32")
                    tmp = T.alloc_local((2,), "float32")
                    told = T.alloc_local((Split.TAIL,), "float32")
                    at = T.alloc_local((2,), "int32")
                    loaded = T.meta_var(cached.memory())
                    first_head: T.let = bx // parts * group
                    head: T.let = bx // parts // per_kv  # the kv head
                    part: T.let = bx % parts
                    stripe: T.let = tx // count
                    length: T.let = positions[by] + 1
                    start: T.let = begin(job, length)
                    blocks: T.let = (length - start + (block - 1)) // block
                    span: T.let = span_of(split, positions[by])
                    mine: T.let = T.min(span, blocks - part * span)
                    if mine > 0:
                        for t in T.unroll(ceil_div(group * count, threads)):
                            if group * count % threads == 0 or t * threads + tx < group * count:
                                qs[t * threads + tx] = head_of.scaled(
                                    head_of.f32(q[by, first_head * count + t * threads + tx]), job.scale
                                )
                        if tx < group:
                            top[tx] = T.float32(LOWEST)
                        for g in T.unroll(group):
                            total[g] = T.float32(0)
                        for i in T.unroll(sums):
                            acc[i] = T.float32(0)
                        T.tvm_storage_sync("shared")
                        for b in T.serial(mine):
                            first: T.let = start + (part * span + b) * block
                            there: T.let = T.min(length - first, block)
                            for r in T.serial(block // turn):
                                for i in turns(ceil_div(turn, at_once)):
                                    if at_once * lanes == threads or tx < at_once * lanes:
                                        at[0] = r * turn + i * at_once + tx // lanes
                                        for g in T.unroll(group):
                                            score[g] = T.float32(0)
                                        if at[0] < there:
                                            at[1] = (
                                                page_table[slots[by], (first + at[0]) // page] * kv + head
                                            ) * page + (first + at[0]) % page
                                            if tx % lanes == 0:
                                                place[at[0]] = at[1]
                                            for d in T.serial(count // lanes // ahead):
                                                for c in T.unroll(ahead):
                                                    key: T.let = cached.load(
                                                        loaded,
                                                        k_cache,
                                                        at[1] // (page * kv),
                                                        at[1] // page % kv,
                                                        at[1] % page,
                                                        (d * ahead + c) * lanes + tx % lanes,
                                                    )
                                                    for g in T.unroll(group):
                                                        query: T.let = qs[
                                                            g * count + (d * ahead + c) * lanes + tx % lanes
                                                        ]
                                                        score[g] = score[g] + head_of.dot(key, query)
                                        for g in T.unroll(group):
                                            pool[
                                                (g * turn + i * at_once + tx // lanes) * (lanes + 1)
                                                + tx % lanes
                                            ] = score[g]
                                T.tvm_storage_sync("shared")
                                for j in T.unroll(ceil_div(group * turn, threads)):
                                    if group * turn % threads == 0 or j * threads + tx < group * turn:
                                        at[0] = j * threads + tx  # head · turn + position
                                        at[1] = r * turn + at[0] % turn
                                        tmp[0] = T.float32(0)
                                        for e in T.unroll(lanes):
                                            tmp[0] = tmp[0] + pool[at[0] * (lanes + 1) + e]
                                        if job.softcap is not None:
                                            tmp[0] = capped(tmp[0], job.softcap)
                                        weight[at[0] // turn * block + at[1]] = T.if_then_else(
                                            at[1] < there, tmp[0], T.float32(LOWEST), dtype="float32"
                                        )
                                T.tvm_storage_sync("shared")
                            if tx < group * block // CELL:
                                tmp[0] = weight[tx * CELL]
                                for e in T.unroll(CELL - 1):
                                    tmp[0] = T.max(tmp[0], weight[tx * CELL + 1 + e])
                                cell[tx] = tmp[0]
                            T.tvm_storage_sync("shared")
                            if tx < group:
                                tmp[0] = top[tx]
                                tmp[1] = tmp[0]
                                for e in T.unroll(block // CELL):
                                    tmp[1] = T.max(tmp[1], cell[tx * (block // CELL) + e])
                                factor[tx] = T.exp(tmp[0] - tmp[1])
                                top[tx] = tmp[1]
                            T.tvm_storage_sync("shared")
                            for j in T.unroll(ceil_div(group * block, threads)):
                                if group * block % threads == 0 or j * threads + tx < group * block:
                                    at[0] = j * threads + tx
                                    weight[at[0]] = T.if_then_else(
                                        at[0] % block < there,
                                        T.exp(weight[at[0]] - top[at[0] // block]),
                                        T.float32(0),
                                        dtype="float32",
                                    )
                            T.tvm_storage_sync("shared")
                            for g in T.unroll(group):
                                tmp[0] = factor[g]
                                total[g] = total[g] * tmp[0]
                                for i in T.unroll(cells * width):
                                    acc[g * cells * width + i] = acc[g * cells * width + i] * tmp[0]
                            for p in T.serial(ceil_div(block, stripes)):
                                at[0] = p * stripes + stripe
                                if stripe < stripes and at[0] < there:
                                    at[1] = place[at[0]]
                                    for g in T.unroll(group):
                                        total[g] = total[g] + weight[g * block + at[0]]
                                    for i in T.unroll(cells):
                                        if whole_head or cells == 1 or i * threads + tx < count:
                                            value: T.let = cached.load(
                                                loaded,
                                                v_cache,
                                                at[1] // (page * kv),
                                                at[1] // page % kv,
                                                at[1] % page,
                                                tx % count if cells == 1 else i * threads + tx,
                                            )
                                            for g in T.unroll(group):
                                                head_of.add(
                                                    acc,
                                                    (g * cells + i) * width,
                                                    value,
                                                    weight[g * block + at[0]],
                                                )
                            T.tvm_storage_sync("shared")
                        if stripe < stripes:
                            if tx % count == 0:
                                for g in T.unroll(group):
                                    striped[stripe * group + g] = total[g]
                        T.tvm_storage_sync("shared")
                        if tx < group:
                            tmp[0] = T.float32(0)
                            for s in T.unroll(stripes):
                                tmp[0] = tmp[0] + striped[s * group + tx]
                            factor[tx] = T.float32(1) / tmp[0]
                            told[0] = top[tx] + T.log(tmp[0])
                            told[1] = told[0] - leading(told[0], job.dtype)
                            told[0] = told[0] - told[1]
                            for e in T.unroll(Split.TAIL - 2):
                                told[2 + e] = T.float32(0)
                            for e in T.unroll(Split.TAIL // width):
                                partial[by, first_head + tx, part, count + e] = head_of.stored(
                                    told, e * width, job.dtype
                                )
                        for r in T.unroll(group // together):
                            if stripe < stripes:
                                for g in T.unroll(together):
                                    for i in T.unroll(cells):
                                        if whole_head or cells == 1 or i * threads + tx < count:
                                            for e in T.unroll(width):
                                                pool[
                                                    (stripe * together + g) * dim
                                                    + e * count
                                                    + (tx % count if cells == 1 else i * threads + tx)
                                                ] = acc[((r * together + g) * cells + i) * width + e]
                            T.tvm_storage_sync("shared")
                            for j in T.unroll(ceil_div(together * count, threads)):
                                if together * count % threads == 0 or j * threads + tx < together * count:
                                    at[0] = (j * threads + tx) // count  # the head
                                    at[1] = (j * threads + tx) % count  # the vector
                                    for e in T.unroll(width):
                                        tmp[0] = T.float32(0)
                                        for s in T.unroll(stripes):
                                            column: T.let = (s * together + at[0]) * dim + e * count
                                            tmp[0] = tmp[0] + pool[column + at[1]]
                                        told[e] = tmp[0] * factor[r * together + at[0]]
                                    partial[by, first_head + r * together + at[0], part, at[1]] = (
                                        head_of.stored(told, 0, job.dtype)
                                    )
                            T.tvm_storage_sync("shared")

    return kernel
