"""Paged attention: flash decoding, split over the sequence for few rows.

A workgroup has one row and the query heads that share one kv head, so that a key or value loaded serves them
all. It walks its range of positions in tiles of 32: scores (a thread a position), then the tile's maximum and
weights, then values (a thread a dimension). With a window the range begins at the first position that the row
sees. Loop bounds come from read-only buffers at uniform indices, so the barriers inside are in uniform
control flow, as WGSL demands.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: SIM102
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.kv import BITS
from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Attend
from nearfar.targets.gpu.kernels.activations import capped
from nearfar.targets.gpu.kernels.attention.cached import Cached
from nearfar.targets.gpu.kernels.attention.heads import HeadVectors
from nearfar.targets.gpu.kernels.common import LOWEST, ceil_div, f32, select, stored
from nearfar.targets.gpu.kernels.script.text import local_array, prim_func

TILE = (
    # positions of a tile, and threads: in SwiftShader 100 positions take 1.5 ms with 32 and 3.7 ms with 64
    32
)
MAX_SHARED_HEADS = 8  # the most query heads of a workgroup, limited by registers and workgroup memory
MAX_SUMS = 64  # sums of values that a thread keeps: of heads of 256 it has 8 dimensions of 8 heads
MAX_CELLS = 8  # the most partial maxima of a head
NAMES = ("q", "k_cache", "v_cache", "positions", "slots", "page_table")


def attention(job: Attend) -> Staged:
    """The launches of an Attend job: one for many rows; two for few, whose sequence is split so that the
    device is filled.
    """
    splits = _splits(job)
    width = job.head_dim + 2
    names = (*job.inputs(), "out")
    if splits == 1:
        return Staged((Stage(select(_attend(job, 1), list(names), "attention"), names),))
    partial = select(_attend(job, splits), [*NAMES, "partial"], "attention_split")
    combined = ("partial", *["sinks"] * job.sinks, "out")
    combine = select(_combine(job, splits), list(combined), "attention_combine")
    scratch = ((job.m, job.heads, splits, width), "float32")
    stages = Stage(partial, (*NAMES, "scratch:0")), Stage(combine, ("scratch:0", *combined[1:]))
    return Staged(stages, (scratch,))


def _splits(job: Attend) -> int:
    """The number of parts of a row's positions: more for long contexts, since empty parts cost time, too."""
    if job.m >= 16:
        return 1
    context = job.pages_per_slot * job.page_size
    seen = context if job.window is None else min(context, job.window)
    splits = 4 if seen <= 4096 else 8 if seen <= 16384 else 16
    return splits if job.m == 1 else splits // 2


def _attend(job: Attend, splits: int) -> tirx.PrimFunc:
    """The kernel for one row over one of `splits` ranges: normalized to `out`, or (values, maximum, sum) to
    `partial`.
    """
    m, heads, kv, dim, page = job.m, job.heads, job.kv_heads, job.head_dim, job.page_size
    cells = ceil_div(dim, TILE)  # the number of dimensions of a thread
    most = max(min(MAX_SHARED_HEADS, MAX_SUMS // cells, heads // kv), 1)
    group = next(size for size in range(most, 0, -1) if heads // kv % size == 0)
    per_kv = heads // kv // group  # workgroups for each kv head
    whole = dim % TILE == 0
    step = 4 if dim % 4 == 0 else 1
    codes = job.kv_dtype in BITS
    cached = Cached.of(job, HeadVectors.of(job) if codes else HeadVectors(1, dim))

    def begin(length):
        """The first position that a row sees; `length`: the row's position plus 1 (0: padding)."""
        return T.int32(0) if job.window is None else T.max(length - job.window, 0)

    @prim_func
    def kernel(
        q: T.Buffer((m, heads * dim), job.dtype),
        k_h: T.handle,
        v_h: T.handle,
        positions: T.Buffer((MAX_STEP,), "int32"),
        slots: T.Buffer((MAX_STEP,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        sinks: T.Buffer((heads,), "float32"),
        partial: T.Buffer((m, heads, splits, dim + 2), "float32"),
        out: T.Buffer((m, heads * dim), job.dtype),
    ):
        pages = T.int32()
        k_cache = T.match_buffer(k_h, cached.extents(pages), cached.dtype)
        v_cache = T.match_buffer(v_h, cached.extents(pages), cached.dtype)
        for bx in T.thread_binding(kv * per_kv * splits, thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(TILE, thread="threadIdx.x"):
                    qs = T.alloc_shared((group * dim,), "float32")
                    weight = T.alloc_shared((group * TILE,), "float32")
                    cell = T.alloc_shared((group * MAX_CELLS,), "float32")
                    place = T.alloc_shared((TILE,), "int32")
                    score = T.alloc_local((group,), "float32")
                    acc = T.alloc_local((group * cells,), "float32")
                    top = T.alloc_local((group,), "float32")
                    total = T.alloc_local((group,), "float32")
                    tmp = T.alloc_local((2,), "float32")
                    at = T.alloc_local((3,), "int32")
                    loaded = T.meta_var(cached.memory())
                    four = T.meta_var(local_array("four", step, "float32") if codes else None)
                    block: T.let = bx // splits  # the block of query heads
                    head: T.let = block // per_kv  # the kv head
                    split: T.let = bx % splits
                    length: T.let = positions[by] + 1
                    start: T.let = begin(length)
                    # A range is a whole number of tiles, so short contexts keep to the first splits.
                    span: T.let = (length - start + TILE * splits - 1) // (TILE * splits)
                    tiles: T.let = T.max(T.min(span, (length - start + TILE - 1) // TILE - split * span), 0)
                    for g in T.unroll(group):
                        top[g] = T.float32(LOWEST)
                        total[g] = T.float32(0)
                        if job.sinks and splits == 1:
                            top[g] = sinks[block * group + g]
                            total[g] = T.float32(1)
                        for i in T.unroll(cells):
                            acc[g * cells + i] = T.float32(0)
                    for t in T.serial(ceil_div(group * dim, TILE)):
                        if group * dim % TILE == 0 or t * TILE + tx < group * dim:
                            qs[t * TILE + tx] = f32(q[by, block * group * dim + t * TILE + tx]) * T.float32(
                                job.scale
                            )
                    T.tvm_storage_sync("shared")
                    for t in T.serial(tiles):
                        at[0] = start + (split * span + t) * TILE + tx
                        for g in T.unroll(group):
                            score[g] = T.float32(LOWEST)
                        at[1] = 0
                        if at[0] < length:
                            at[1] = (page_table[slots[by], at[0] // page] * kv + head) * page + at[0] % page
                            for g in T.unroll(group):
                                score[g] = T.float32(0)
                            for part in T.serial(dim // step):
                                if codes:
                                    cached.head.put(
                                        four,
                                        0,
                                        cached.load(
                                            loaded,
                                            k_cache,
                                            at[1] // (page * kv),
                                            at[1] // page % kv,
                                            at[1] % page,
                                            part,
                                        ),
                                    )
                                # the values are neighbours, which Vulkan loads at once
                                for e in T.unroll(step):
                                    tmp[0] = (
                                        four[e]
                                        if codes
                                        else f32(
                                            k_cache[
                                                at[1] // (page * kv),
                                                at[1] // page % kv,
                                                at[1] % page,
                                                part * step + e,
                                            ]
                                        )
                                    )
                                    for g in T.unroll(group):
                                        score[g] = score[g] + tmp[0] * qs[g * dim + part * step + e]
                            if job.softcap is not None:
                                for g in T.unroll(group):
                                    score[g] = capped(score[g], job.softcap)
                        place[tx] = at[1]
                        for g in T.unroll(group):
                            weight[g * TILE + tx] = score[g]
                        T.tvm_storage_sync("shared")
                        for turn in T.serial(ceil_div(group * MAX_CELLS, TILE)):
                            at[2] = turn * TILE + tx
                            if at[2] < group * MAX_CELLS:
                                tmp[0] = T.float32(LOWEST)
                                for p in T.serial(TILE // MAX_CELLS):
                                    tmp[0] = T.max(tmp[0], weight[at[2] * (TILE // MAX_CELLS) + p])
                                cell[at[2]] = tmp[0]
                        T.tvm_storage_sync("shared")
                        for g in T.unroll(group):
                            tmp[0] = top[g]
                            for p in T.unroll(MAX_CELLS):
                                tmp[0] = T.max(tmp[0], cell[g * MAX_CELLS + p])
                            tmp[1] = T.exp(top[g] - tmp[0])
                            top[g] = tmp[0]
                            total[g] = total[g] * tmp[1]
                            for i in T.unroll(cells):
                                acc[g * cells + i] = acc[g * cells + i] * tmp[1]
                            weight[g * TILE + tx] = T.if_then_else(
                                at[0] < length, T.exp(score[g] - top[g]), T.float32(0), dtype="float32"
                            )
                        T.tvm_storage_sync("shared")
                        for p in T.serial(T.min(TILE, length - start - (split * span + t) * TILE)):
                            at[1] = place[p]
                            for g in T.unroll(group):
                                total[g] = total[g] + weight[g * TILE + p]
                            for i in T.unroll(cells):
                                if whole or i * TILE + tx < dim:
                                    tmp[0] = cached.number(
                                        loaded,
                                        v_cache,
                                        at[1] // (page * kv),
                                        at[1] // page % kv,
                                        at[1] % page,
                                        i * TILE + tx,
                                    )
                                    for g in T.unroll(group):
                                        acc[g * cells + i] = (
                                            acc[g * cells + i] + tmp[0] * weight[g * TILE + p]
                                        )
                        T.tvm_storage_sync("shared")
                    for g in T.unroll(group):
                        for i in T.unroll(cells):
                            if whole or i * TILE + tx < dim:
                                if splits > 1:
                                    partial[by, block * group + g, split, i * TILE + tx] = acc[g * cells + i]
                                else:
                                    tmp[0] = T.if_then_else(
                                        total[g] > T.float32(0), T.float32(1) / total[g], T.float32(0)
                                    )
                                    out[by, (block * group + g) * dim + i * TILE + tx] = stored(
                                        acc[g * cells + i] * tmp[0], job.dtype
                                    )
                        if splits > 1:
                            if tx == 0:
                                partial[by, block * group + g, split, dim] = top[g]
                                partial[by, block * group + g, split, dim + 1] = total[g]

    return kernel


def _combine(job: Attend, splits: int) -> tirx.PrimFunc:
    """The kernel that weighs the splits' values by their maxima; an empty split has sum 0. Sinks count here,
    once.
    """
    m, heads, dim = job.m, job.heads, job.head_dim
    total_out = m * heads * dim

    @prim_func
    def kernel(
        partial: T.Buffer((m, heads, splits, dim + 2), "float32"),
        sinks: T.Buffer((heads,), "float32"),
        out: T.Buffer((m, heads * dim), job.dtype),
    ):
        for bx in T.thread_binding(ceil_div(total_out, TILE), thread="blockIdx.x"):
            for tx in T.thread_binding(TILE, thread="threadIdx.x"):
                at = T.alloc_local((3,), "int32")
                value = T.alloc_local((4,), "float32")
                at[0] = (bx * TILE + tx) // (heads * dim)
                at[1] = (bx * TILE + tx) % (heads * dim) // dim
                at[2] = (bx * TILE + tx) % dim
                if at[0] < m:
                    value[0] = T.float32(LOWEST)
                    value[1] = T.float32(0)
                    value[2] = T.float32(0)
                    for s in T.unroll(splits):
                        value[0] = T.max(value[0], partial[at[0], at[1], s, dim])
                    if job.sinks:
                        value[0] = T.max(value[0], sinks[at[1]])
                        value[2] = T.exp(sinks[at[1]] - value[0])
                    for s in T.unroll(splits):
                        value[3] = T.exp(partial[at[0], at[1], s, dim] - value[0])
                        value[1] = value[1] + value[3] * partial[at[0], at[1], s, at[2]]
                        value[2] = value[2] + value[3] * partial[at[0], at[1], s, dim + 1]
                    value[3] = T.if_then_else(value[2] > T.float32(0), value[1] / value[2], T.float32(0))
                    out[at[0], at[1] * dim + at[2]] = stored(value[3], job.dtype)

    return kernel
