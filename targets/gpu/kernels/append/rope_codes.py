"""Rotation of q and k by position, and the append of k and v to a quantized cache.

A workgroup has one head of some rows. A lane owns whole pairs (i, i + head_dim/2): a vector of each half.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script import tirx as T

from nearfar.kernels.jobs import RopeAppend, Rows
from nearfar.targets.gpu.kernels.append.quantizer import Quantizer
from nearfar.targets.gpu.kernels.append.rows import PLACE, factor, turn
from nearfar.targets.gpu.kernels.attention.cached import Cached, PageWords
from nearfar.targets.gpu.kernels.attention.heads import HeadVectors
from nearfar.targets.gpu.kernels.common import ceil_div, stored
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, at, f32x4, joined, spread

THREADS = 64


def described(job: RopeAppend, rotated: bool) -> Rows:
    """The Rows job whose output the kernel reads."""
    return Rows.of(replace(job, rope=rotated))


def appended(job: RopeAppend, x_dtype: str, rotated: bool) -> tirx.PrimFunc:
    """The kernel; see rope._appended; heads are in the order q, k, v. `rows`: the output of Rows, since a
    kernel has only eight buffers.
    """
    m, heads, kv = job.m, job.heads, job.kv_heads
    layout, half, all_heads = PageWords.of(job), job.head_dim // (2 * WIDTH), job.x_heads
    cached, turning = Cached.of(job, HeadVectors.of(job)), heads + kv
    facts = described(job, rotated).out[0][1] // WIDTH
    rows_of_group = min(max(THREADS // half, 1), m)
    quantizer = Quantizer(layout, rows_of_group)

    # These write statements into the kernel below.

    def scale(pair, rows, row):
        for side in range(2):
            T.buffer_store(pair, pair[side] * factor(rows, row), [side])

    def put(pair, out, row, bx, tx):
        for side in range(2):
            made = joined([stored(at(pair[side], e), job.dtype) for e in range(WIDTH)])
            T.buffer_store(out, made, [row, (bx * 2 + side) * half + tx])

    def center(pair, weights, rounding, head, tx):
        """Subtract a key's constant, and load the weights of its rounding errors."""
        for side in range(2):
            place = (head * 2 + side) * half + tx
            T.buffer_store(pair, pair[side] - rounding[place], [side])
            T.buffer_store(weights, rounding[kv * 2 * half + place], [side])

    def measure(held, pair, ty, tx):
        for side in range(2):
            quantizer.measure(held, ty, side * half + tx, pair, side)

    def encode(held, pair, weights, ty, tx):
        for side in range(2):
            quantizer.encode(held, ty, side * half + tx, pair, side, weights[side])

    def write(held, ty, tx, cache, place, head):
        page, offset = place // job.page_size, place % job.page_size
        for side in range(2):
            quantizer.write(held, ty, side * half + tx, side, cache, page, head, offset)

    @prim_func
    def kernel(
        x: T.Buffer((m, all_heads * 2 * half), f"{x_dtype}x{WIDTH}"),
        rows: T.Buffer((m, facts), f"int32x{WIDTH}"),
        k_rounding: T.Buffer((2 * kv * 2 * half,), f"float32x{WIDTH}"),
        k_h: T.handle,
        v_h: T.handle,
        out: T.Buffer((m, heads * 2 * half), f"{job.dtype}x{WIDTH}"),
    ):
        pages = T.int32()
        k_cache = T.match_buffer(k_h, cached.extents(pages), cached.dtype)
        v_cache = T.match_buffer(v_h, cached.extents(pages), cached.dtype)
        for bx in T.thread_binding(all_heads, thread="blockIdx.x"):
            for by in T.thread_binding(ceil_div(m, rows_of_group), thread="blockIdx.y"):
                for ty in T.thread_binding(rows_of_group, thread="threadIdx.y"):
                    for tx in T.thread_binding(half, thread="threadIdx.x"):
                        held = T.meta_var(quantizer.memory())
                        pair = T.alloc_local((2,), f"float32x{WIDTH}")
                        turned = T.alloc_local((2,), f"float32x{WIDTH}")
                        weights = T.alloc_local((2,), f"float32x{WIDTH}")
                        row: T.let = T.min(by * rows_of_group + ty, m - 1)
                        there: T.let = by * rows_of_group + ty < m
                        place: T.let = at(rows[row, 0], PLACE)
                        appends: T.let = there & (place >= 0) & (bx >= heads)
                        pair[0] = f32x4(x[row, bx * 2 * half + tx])
                        pair[1] = f32x4(x[row, (bx * 2 + 1) * half + tx])
                        if rotated:
                            if bx < turning:
                                turn(pair, 0, turned, rows, row, tx, half)
                        if bx < heads:
                            if job.q_scale is not None:
                                scale(pair, rows, row)
                            if there:
                                put(pair, out, row, bx, tx)
                        for side in T.unroll(2):
                            weights[side] = spread(T.float32(0))
                        if job.rounds_keys:
                            if (bx >= heads) & (bx < turning):
                                center(pair, weights, k_rounding, bx - heads, tx)
                        measure(held, pair, ty, tx)
                        T.tvm_storage_sync("shared")
                        if appends:
                            encode(held, pair, weights, ty, tx)
                        if quantizer.joins:
                            T.tvm_storage_sync("shared")
                        if appends:
                            if bx < turning:
                                write(held, ty, tx, k_cache, place, bx - heads)
                            else:
                                write(held, ty, tx, v_cache, place, bx - turning)

    return kernel
