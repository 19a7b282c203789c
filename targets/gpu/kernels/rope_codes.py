"""Rotation of q and k by position, and the append of k and v to a quantized cache.

A workgroup has one head of some rows. A lane owns whole pairs (i, i + head_dim/2): a vector of each half.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: SIM102
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.targets.jobs import RopeAppend

from .cached import Cached, Quantized
from .common import ceil_div, f32, stored
from .heads import Head
from .quantizer import Quantizer
from .script import prim_func
from .vectors import WIDTH, at, f32x4, joined, spread

THREADS = 64


def appended(job: RopeAppend, x_dtype: str, rotated: bool) -> tirx.PrimFunc:
    """See rope._appended; heads in the order q, k, v."""
    m, heads, kv, page = job.m, job.heads, job.kv_heads, job.page_size
    layout, half, all_heads = Quantized.of(job), job.head_dim // (2 * WIDTH), job.x_heads
    cached, turning = Cached.of(job, Head.of(job)), heads + kv
    rows = min(max(THREADS // half, 1), m)
    quantizer = Quantizer(layout, rows)
    beta, original = job.q_scale or (0.0, 1.0)

    # These write statements into the kernel below.

    def turn(pair, turned, rope, position, tx):
        cos, sin = (rope[T.max(position, 0), tx + side * half] for side in range(2))
        T.buffer_store(turned, pair[0] * cos - pair[1] * sin, [0])
        T.buffer_store(turned, pair[1] * cos + pair[0] * sin, [1])
        for side in range(2):
            T.buffer_store(pair, turned[side], [side])

    def scale(pair, position):
        reached = f32(1 + T.max(position, 0) // int(original))
        factor = T.Bind(T.float32(1) + T.float32(beta) * T.log(reached))
        for side in range(2):
            T.buffer_store(pair, pair[side] * spread(factor), [side])

    def put(pair, out, row, bx, tx):
        for side in range(2):
            made = joined([stored(at(pair[side], e), job.dtype) for e in range(WIDTH)])
            T.buffer_store(out, made, [row, (bx * 2 + side) * half + tx])

    def measure(held, pair, ty, tx):
        for side in range(2):
            quantizer.measure(held, ty, side * half + tx, pair, side)

    def encode(held, pair, ty, tx):
        for side in range(2):
            quantizer.encode(held, ty, side * half + tx, pair, side, side)

    def write(held, tx, cache, place, head, offset):
        for side in range(2):
            quantizer.write(held, side * half + tx, side, cache, place, head, offset)

    def join(held, ty, tx, cache, place, head, offset):
        for side in range(2):
            quantizer.join(held, ty, side * half + tx, cache, place, head, offset)

    @prim_func
    def kernel(
        x: T.Buffer((m, all_heads * 2 * half), f"{x_dtype}x{WIDTH}"),
        positions: T.Buffer((MAX_STEP,), "int32"),
        slots: T.Buffer((MAX_STEP,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        rope_h: T.handle,
        k_h: T.handle,
        v_h: T.handle,
        out: T.Buffer((m, heads * 2 * half), f"{job.dtype}x{WIDTH}"),
    ):
        pages = T.int32()
        context = T.int32()
        rope = T.match_buffer(rope_h, (context, 2 * half), f"float32x{WIDTH}")
        k_cache = T.match_buffer(k_h, cached.extents(pages), cached.dtype)
        v_cache = T.match_buffer(v_h, cached.extents(pages), cached.dtype)
        for bx in T.thread_binding(all_heads, thread="blockIdx.x"):
            for by in T.thread_binding(ceil_div(m, rows), thread="blockIdx.y"):
                for ty in T.thread_binding(rows, thread="threadIdx.y"):
                    for tx in T.thread_binding(half, thread="threadIdx.x"):
                        held = T.meta_var(quantizer.memory())
                        pair = T.alloc_local((2,), f"float32x{WIDTH}")
                        turned = T.alloc_local((2,), f"float32x{WIDTH}")
                        at_page = T.alloc_local((1,), "int32")
                        row: T.let = T.min(by * rows + ty, m - 1)
                        position: T.let = positions[row]
                        there: T.let = by * rows + ty < m
                        appends: T.let = there & (position >= 0) & (bx >= heads)
                        pair[0] = f32x4(x[row, bx * 2 * half + tx])
                        pair[1] = f32x4(x[row, (bx * 2 + 1) * half + tx])
                        if rotated:
                            if bx < turning:
                                turn(pair, turned, rope, position, tx)
                        if bx < heads:
                            if job.q_scale is not None:
                                scale(pair, position)
                            if there:
                                put(pair, out, row, bx, tx)
                        measure(held, pair, ty, tx)
                        at_page[0] = 0
                        if appends:
                            at_page[0] = page_table[slots[row], position // page]
                        T.tvm_storage_sync("shared")
                        if appends:
                            encode(held, pair, ty, tx)
                            if bx < turning:
                                write(held, tx, k_cache, at_page[0], bx - heads, position % page)
                            else:
                                write(held, tx, v_cache, at_page[0], bx - turning, position % page)
                        if quantizer.joins:
                            T.tvm_storage_sync("shared")
                            if appends:
                                if bx < turning:
                                    join(held, ty, tx, k_cache, at_page[0], bx - heads, position % page)
                                else:
                                    join(held, ty, tx, v_cache, at_page[0], bx - turning, position % page)

    return kernel
