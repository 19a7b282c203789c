"""Attention for many rows: a workgroup has a tile of rows, and reads each key and value once for all of them.

A tile is rows of one sequence at neighbouring positions, as a step has them: it begins where the sequence
changes, and at every multiple of the tile's height. There is a workgroup for each row, and those whose row
begins no tile return at once. Rows are found in read-only buffers at uniform indices, so control flow is
uniform, as WGSL demands around barriers. So any mix of sequences and padding gives right results, and a
sequence in prefill is read once for each tile.

If there are fewer tiles than the class requires workgroups, several workgroups divide a tile's positions, as
in flash_decode.py: the fewer rows a tile has, the more. Each writes its part (jobs.Split, with the number of
parts in the third place behind the values of the first), and a second launch joins them.

The vectors of a tile are its rows times the query heads of a workgroup. Keys, then values, of some positions
are staged in workgroup memory, a slice of the head at a time; a thread computes scores of a few vectors and a
few keys, and sums values of the same vectors in registers (Dao, "FlashAttention-2", 2023).
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: SIM102
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Attend, Split
from nearfar.targets.gpu.classes import DeviceClass
from nearfar.targets.gpu.kernels.activations import capped
from nearfar.targets.gpu.kernels.attention.cached import Cached
from nearfar.targets.gpu.kernels.attention.combine import combine
from nearfar.targets.gpu.kernels.attention.flash_tile import LEAST, Tile, most_parts, tile_of
from nearfar.targets.gpu.kernels.attention.heads import HeadVectors, begin
from nearfar.targets.gpu.kernels.common import LOWEST, ceil_div, leading, select, stored
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import of_numbers


def attention(job: Attend, device: DeviceClass) -> Staged:
    """The launches of an Attend job: one, or two if tiles are split into parts."""
    tile = tile_of(job, device)
    split = Split(most_parts(job, tile), LEAST, job.window, job.sinks)
    names = (*job.inputs(), "out")
    if split.count == 1:
        return Staged(
            (Stage(of_numbers(select(_attend(job, tile, split), list(names), "attention")), names),)
        )
    names = tuple(name for name in job.inputs() if name != "sinks")
    parts = of_numbers(select(_attend(job, tile, split), [*names, "partial"], "attention_parts"))
    combined = "scratch:0", *["sinks"] * job.sinks, "out"
    stages = (
        Stage(parts, (*names, "scratch:0")),
        Stage(combine(job, split, device.subgroup, counted=True), combined),
    )
    return Staged(stages, (((job.m, job.heads, split.count, job.head_dim + Split.TAIL), job.dtype),))


def _attend(job: Attend, tile: Tile, split: Split) -> tirx.PrimFunc:
    """The kernel for the tile that begins with a row, if one does, over all positions or one part of them."""
    m, heads, kv, dim, page = job.m, job.heads, job.kv_heads, job.head_dim, job.page_size
    head_of = HeadVectors.of(job)
    cached = Cached.of(job, head_of)
    width, count = head_of.width, head_of.count
    group, threads, queries, keys = tile.heads, tile.threads, tile.queries, tile.keys
    lanes, groups, own_keys, piece = tile.lanes, tile.groups, tile.own_keys, tile.slice
    per_kv = heads // kv // group  # workgroups for each kv head
    own = tile.vectors // groups  # vectors of a thread
    pieces, columns = count // piece, ceil_div(piece, lanes)
    values = pieces * columns * width  # sums for each vector
    stride, row_stride = piece + 1, keys + 1  # one vector more than needed, which spares the memory banks
    parts, sinks_here = split.count, job.sinks and split.count == 1

    def row_of(mine, i):
        """The tile's row of a thread's vector `i`, written so that its vectors share the arithmetic."""
        if own % group == 0:
            return mine * (own // group) + i // group
        return mine // (group // own) if group % own == 0 else (mine * own + i) // group

    def head_in(mine, i):
        """The head of the thread's query `i` within its group."""
        if own % group == 0:
            return i % group
        return mine % (group // own) * own + i if group % own == 0 else (mine * own + i) % group

    def wanted(q, by, first_head, mine, i, s, d):
        """Vector `d` of a slice of the query that is a thread's vector `i`."""
        row = T.min(by + row_of(mine, i), m - 1)
        return head_of.f32(q[row, (first_head + head_in(mine, i)) * count + s * piece + d])

    @prim_func
    def kernel(
        q: T.Buffer((m, heads * count), head_of.dtype(job.dtype)),
        k_h: T.handle,
        v_h: T.handle,
        positions: T.Buffer((MAX_STEP,), "int32"),
        slots: T.Buffer((MAX_STEP,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        sinks: T.Buffer((heads,), "float32"),
        out: T.Buffer((m, heads * dim), job.dtype),
        partial: T.Buffer((m, heads, parts, count + Split.TAIL // width), head_of.dtype(job.dtype)),
    ):
        pages = T.int32()
        k_cache = T.match_buffer(k_h, cached.extents(pages), cached.dtype)
        v_cache = T.match_buffer(v_h, cached.extents(pages), cached.dtype)
        for bx in T.thread_binding(kv * per_kv * parts, thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(threads, thread="threadIdx.x"):
                    stage = T.alloc_shared((keys * stride,), head_of.dtype("float32"))
                    weight = T.alloc_shared((tile.vectors * row_stride,), "float32")
                    told = T.alloc_shared((tile.vectors * lanes,), "float32")
                    query = T.alloc_local((min(own, own_keys) * width,), "float32")
                    score = T.alloc_local((own * own_keys,), "float32")
                    acc = T.alloc_local((own * values,), "float32")
                    top = T.alloc_local((own,), "float32")
                    total = T.alloc_local((own,), "float32")
                    tmp = T.alloc_local((2,), "float32")
                    at = T.alloc_local((2,), "int32")
                    loaded = T.meta_var(cached.memory())
                    rows = T.alloc_local((1,), "int32")
                    tail = T.alloc_local((Split.TAIL,), "float32")
                    first_head: T.let = bx // parts * group
                    head: T.let = bx // parts // per_kv  # the kv head
                    part: T.let = bx % parts
                    lane: T.let = tx % lanes
                    mine: T.let = tx // lanes  # vector i of a thread is mine · own + i
                    position: T.let = positions[by]
                    before: T.let = T.max(by - 1, 0)
                    if position < 0:
                        if parts == 1:
                            for t in T.serial(ceil_div(group * dim, threads)):
                                if t * threads + tx < group * dim:
                                    out[by, first_head * dim + t * threads + tx] = stored(
                                        T.float32(0), job.dtype
                                    )
                        else:
                            if part == 0 and tx < group:
                                for e in T.unroll(Split.TAIL):
                                    tail[e] = T.float32(0)
                                for e in T.unroll(Split.TAIL // width):
                                    partial[by, first_head + tx, 0, count + e] = head_of.stored(
                                        tail, e * width, job.dtype
                                    )
                    if position >= 0 and (
                        by % queries == 0
                        or slots[before] != slots[by]
                        or positions[before] < 0
                        or positions[before] + 1 != position
                    ):
                        rows[0] = 1
                        for i in T.serial(1, queries):
                            if (
                                rows[0] == i
                                and by % queries + i < queries
                                and by + i < m
                                and slots[T.min(by + i, m - 1)] == slots[by]
                                and positions[T.min(by + i, m - 1)] == position + i
                            ):
                                rows[0] = i + 1
                        count_rows: T.let = rows[0]
                        end: T.let = position + count_rows
                        start: T.let = begin(job, position + 1)
                        blocks: T.let = (end - start + (keys - 1)) // keys
                        most: T.let = T.min(tile.parts * queries // count_rows, parts)
                        span: T.let = (
                            T.max((blocks + most - 1) // most, LEAST // keys) if parts > 1 else blocks
                        )
                        mine_blocks: T.let = T.min(span, blocks - part * span)
                        for i in T.unroll(own):
                            top[i] = T.float32(LOWEST)
                            total[i] = T.float32(0)
                            if sinks_here:
                                top[i] = sinks[first_head + head_in(mine, i)]
                                total[i] = T.if_then_else(
                                    lane == 0, T.float32(1), T.float32(0), dtype="float32"
                                )
                        for i in T.unroll(own * values):
                            acc[i] = T.float32(0)
                        for t in T.serial(mine_blocks):
                            first: T.let = start + (part * span + t) * keys
                            for i in T.unroll(own * own_keys):
                                score[i] = T.float32(0)
                            for s in T.serial(pieces):
                                for n in T.unroll(ceil_div(keys * piece, threads)):
                                    if keys * piece % threads == 0 or n * threads + tx < keys * piece:
                                        at[0] = (n * threads + tx) // piece  # the key
                                        if first + at[0] < end:
                                            at[1] = page_table[slots[by], (first + at[0]) // page]
                                            stage[at[0] * stride + (n * threads + tx) % piece] = cached.load(
                                                loaded,
                                                k_cache,
                                                at[1],
                                                head,
                                                (first + at[0]) % page,
                                                s * piece + (n * threads + tx) % piece,
                                            )
                                T.tvm_storage_sync("shared")
                                for d in T.serial(piece):
                                    # The fewer of queries and keys are kept in registers.
                                    for i in T.unroll(own):
                                        if own <= own_keys:
                                            head_of.put(
                                                query, i * width, wanted(q, by, first_head, mine, i, s, d)
                                            )
                                    for j in T.unroll(own_keys):
                                        key: T.let = stage[(j * lanes + lane) * stride + d]
                                        if own > own_keys:
                                            head_of.put(query, j * width, key)
                                        else:
                                            for i in T.unroll(own):
                                                score[i * own_keys + j] = head_of.dot_of(
                                                    score[i * own_keys + j], query, i * width, key
                                                )
                                    for i in T.unroll(own):
                                        if own > own_keys:
                                            asked: T.let = wanted(q, by, first_head, mine, i, s, d)
                                            for j in T.unroll(own_keys):
                                                score[i * own_keys + j] = head_of.dot_of(
                                                    score[i * own_keys + j], query, j * width, asked
                                                )
                                T.tvm_storage_sync("shared")
                            for i in T.unroll(own):
                                tmp[0] = T.float32(LOWEST)
                                at[0] = position + row_of(mine, i)  # the position of the vector's row
                                for j in T.unroll(own_keys):
                                    tmp[1] = score[i * own_keys + j] * T.float32(job.scale)
                                    if job.softcap is not None:
                                        tmp[1] = capped(tmp[1], job.softcap)
                                    score[i * own_keys + j] = tmp[1]
                                    at[1] = first + j * lanes + lane
                                    if seen_by(job, at[1], at[0]):
                                        tmp[0] = T.max(tmp[0], tmp[1])
                                told[(mine * own + i) * lanes + lane] = tmp[0]
                            T.tvm_storage_sync("shared")
                            for i in T.unroll(own):
                                tmp[0] = top[i]
                                for e in T.unroll(lanes):
                                    tmp[0] = T.max(tmp[0], told[(mine * own + i) * lanes + e])
                                tmp[1] = T.exp(top[i] - tmp[0])
                                top[i] = tmp[0]
                                total[i] = total[i] * tmp[1]
                                for e in T.unroll(values):
                                    acc[i * values + e] = acc[i * values + e] * tmp[1]
                                at[0] = position + row_of(mine, i)
                                for j in T.unroll(own_keys):
                                    at[1] = first + j * lanes + lane
                                    tmp[1] = T.if_then_else(
                                        seen_by(job, at[1], at[0]),
                                        T.exp(score[i * own_keys + j] - tmp[0]),
                                        T.float32(0),
                                        dtype="float32",
                                    )
                                    total[i] = total[i] + tmp[1]
                                    weight[(mine * own + i) * row_stride + j * lanes + lane] = tmp[1]
                            for s in T.unroll(pieces):
                                for n in T.unroll(ceil_div(keys * piece, threads)):
                                    if keys * piece % threads == 0 or n * threads + tx < keys * piece:
                                        at[0] = (n * threads + tx) // piece
                                        if first + at[0] < end:
                                            at[1] = page_table[slots[by], (first + at[0]) // page]
                                            stage[at[0] * stride + (n * threads + tx) % piece] = cached.load(
                                                loaded,
                                                v_cache,
                                                at[1],
                                                head,
                                                (first + at[0]) % page,
                                                s * piece + (n * threads + tx) % piece,
                                            )
                                T.tvm_storage_sync("shared")
                                for p in T.serial(T.min(end - first, keys)):
                                    for c in T.unroll(columns):
                                        # Lanes beyond the slice repeat its last vector, and write nothing.
                                        value: T.let = stage[p * stride + T.min(c * lanes + lane, piece - 1)]
                                        for i in T.unroll(own):
                                            head_of.add(
                                                acc,
                                                i * values + (s * columns + c) * width,
                                                value,
                                                weight[(mine * own + i) * row_stride + p],
                                            )
                                T.tvm_storage_sync("shared")
                        for i in T.unroll(own):
                            told[(mine * own + i) * lanes + lane] = total[i]
                        T.tvm_storage_sync("shared")
                        for i in T.unroll(own):
                            tmp[0] = T.float32(0)
                            # a loop, because unrolled code would keep its addresses in registers
                            for e in T.serial(lanes):
                                tmp[0] = tmp[0] + told[(mine * own + i) * lanes + e]
                            # A row may see no position of a part.
                            tmp[1] = T.Select(tmp[0] == T.float32(0), T.float32(0), T.float32(1) / tmp[0])
                            at[0] = by + row_of(mine, i)
                            at[1] = first_head + head_in(mine, i)
                            if at[0] < by + count_rows and mine_blocks > 0:
                                for s in T.unroll(pieces):
                                    for c in T.unroll(columns):
                                        if c * lanes + lane < piece:
                                            for e in T.unroll(width):
                                                tail[e] = (
                                                    acc[i * values + (s * columns + c) * width + e] * tmp[1]
                                                )
                                            if parts == 1:
                                                for e in T.unroll(width):
                                                    out[
                                                        at[0],
                                                        at[1] * dim
                                                        + (s * piece + c * lanes + lane) * width
                                                        + e,
                                                    ] = stored(tail[e], job.dtype)
                                            else:
                                                partial[at[0], at[1], part, s * piece + c * lanes + lane] = (
                                                    head_of.stored(tail, 0, job.dtype)
                                                )
                                if parts > 1 and lane == 0:
                                    tail[0] = T.Select(
                                        tmp[0] == T.float32(0), T.float32(LOWEST), top[i] + T.log(tmp[0])
                                    )
                                    tail[1] = tail[0] - leading(tail[0], job.dtype)
                                    tail[0] = tail[0] - tail[1]
                                    tail[2] = T.Cast("float32", (blocks + span - 1) // span)
                                    tail[3] = T.float32(0)
                                    for e in T.unroll(Split.TAIL // width):
                                        partial[at[0], at[1], part, count + e] = head_of.stored(
                                            tail, e * width, job.dtype
                                        )

    return kernel


def seen_by(job: Attend, key, position):
    """Whether a row at a position sees a key."""
    return key <= position if job.window is None else (key <= position) & (key > position - job.window)
