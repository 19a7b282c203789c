"""Rotate q and k by position and append k and v to the paged cache."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.targets.base import Attention, Stage, Staged

from .common import ceil_div, f32, select

THREADS = 64
CACHE = ["qkv", "positions", "slots", "page_table", "rope"]


def rope_append(job: Attention, qk_norm: float | None) -> Staged:
    """One launch; two with the norm of q and k, whose ten buffers exceed the eight of a kernel."""
    kv = job.kv_heads
    if qk_norm is None:
        names = [*CACHE, "k_cache", "v_cache", "q"]
        func = select(_flat(job), names, "rope_append")
        return Staged((Stage(func, tuple(names)),))
    rotate = ["qkv", "positions", "rope", "q_norm", "q"]
    append = [*CACHE, "k_norm", "k_cache", "v_cache"]
    q = select(_normed(job, qk_norm, 0, job.heads), rotate, "rope_norm_q")
    k = select(_normed(job, qk_norm, job.heads, job.heads + 2 * kv), append, "rope_norm_append")
    return Staged((Stage(q, tuple(rotate)), Stage(k, tuple(append))))


def _flat(job: Attention) -> tirx.PrimFunc:
    """A thread a pair (i, i + head_dim/2) of a row's head; heads in the order q, k, v."""
    m, heads, kv, half = job.m, job.heads, job.kv_heads, job.head_dim // 2
    all_heads = heads + 2 * kv
    total = m * all_heads * half

    @T.prim_func(check_well_formed=False)
    def kernel(
        qkv: T.Buffer((m, all_heads * half * 2), job.dtype),
        positions: T.Buffer((256,), "int32"),
        slots: T.Buffer((256,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        rope_h: T.handle,
        k_h: T.handle,
        v_h: T.handle,
        q: T.Buffer((m, heads * half * 2), job.dtype),
    ):
        pages = T.int32()
        context = T.int32()
        rope = T.match_buffer(rope_h, (context, half * 2), "float32")
        k_cache = T.match_buffer(k_h, (pages, kv, job.page_size, half * 2), job.kv_dtype)
        v_cache = T.match_buffer(v_h, (pages, kv, job.page_size, half * 2), job.kv_dtype)
        for bx in T.thread_binding(ceil_div(total, THREADS), thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                at = T.alloc_local((6,), "int32")
                value = T.alloc_local((6,), "float32")
                at[0] = (bx * THREADS + tx) // (all_heads * half)  # row
                at[1] = (bx * THREADS + tx) % (all_heads * half) // half  # head
                at[2] = (bx * THREADS + tx) % half  # pair
                if at[0] < m:
                    at[3] = positions[at[0]]
                    value[0] = f32(qkv[at[0], at[1] * half * 2 + at[2]])
                    value[1] = f32(qkv[at[0], at[1] * half * 2 + half + at[2]])
                    value[4] = value[0]
                    value[5] = value[1]
                    if at[1] < heads + kv:
                        value[2] = rope[T.max(at[3], 0), at[2]]
                        value[3] = rope[T.max(at[3], 0), half + at[2]]
                        value[4] = value[0] * value[2] - value[1] * value[3]
                        value[5] = value[1] * value[2] + value[0] * value[3]
                    if at[1] < heads:
                        q[at[0], at[1] * half * 2 + at[2]] = T.Cast(job.dtype, value[4])
                        q[at[0], at[1] * half * 2 + half + at[2]] = T.Cast(job.dtype, value[5])
                    else:
                        if at[3] >= 0:
                            at[4] = page_table[slots[at[0]], at[3] // job.page_size]
                            at[5] = at[3] % job.page_size
                            if at[1] < heads + kv:
                                k_cache[at[4], at[1] - heads, at[5], at[2]] = T.Cast(job.kv_dtype, value[4])
                                k_cache[at[4], at[1] - heads, at[5], half + at[2]] = T.Cast(job.kv_dtype, value[5])
                            else:
                                v_cache[at[4], at[1] - heads - kv, at[5], at[2]] = T.Cast(job.kv_dtype, value[4])
                                v_cache[at[4], at[1] - heads - kv, at[5], half + at[2]] = T.Cast(job.kv_dtype, value[5])

    return kernel


def _normed(job: Attention, eps: float, first: int, last: int) -> tirx.PrimFunc:
    """A workgroup a row's head among heads first…last-1 (q, k, v in order), with the norm of its q or k before the rotation."""
    m, heads, kv, half = job.m, job.heads, job.kv_heads, job.head_dim // 2
    queries = first == 0

    @T.prim_func(check_well_formed=False)
    def kernel(
        qkv: T.Buffer((m, (heads + 2 * kv) * half * 2), job.dtype),
        positions: T.Buffer((256,), "int32"),
        slots: T.Buffer((256,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        rope_h: T.handle,
        q_norm: T.Buffer((half * 2,), "float32"),
        k_norm: T.Buffer((half * 2,), "float32"),
        k_h: T.handle,
        v_h: T.handle,
        q: T.Buffer((m, heads * half * 2), job.dtype),
    ):
        pages = T.int32()
        context = T.int32()
        rope = T.match_buffer(rope_h, (context, half * 2), "float32")
        k_cache = T.match_buffer(k_h, (pages, kv, job.page_size, half * 2), job.kv_dtype)
        v_cache = T.match_buffer(v_h, (pages, kv, job.page_size, half * 2), job.kv_dtype)
        for bx in T.thread_binding(last - first, thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(half, thread="threadIdx.x"):
                    squares = T.alloc_shared((half,), "float32")
                    value = T.alloc_local((6,), "float32")
                    at = T.alloc_local((3,), "int32")
                    value[0] = f32(qkv[by, (first + bx) * half * 2 + tx])
                    value[1] = f32(qkv[by, (first + bx) * half * 2 + half + tx])
                    squares[tx] = value[0] * value[0] + value[1] * value[1]
                    T.tvm_storage_sync("shared")
                    at[0] = positions[by]
                    value[4] = value[0]
                    value[5] = value[1]
                    if queries or bx < kv:
                        value[2] = T.float32(0)
                        for t in T.serial(half):
                            value[2] = value[2] + squares[t]
                        value[2] = T.rsqrt(value[2] * T.float32(0.5 / half) + T.float32(eps))
                        if queries:
                            value[0] = value[0] * value[2] * q_norm[tx]
                            value[1] = value[1] * value[2] * q_norm[half + tx]
                        else:
                            value[0] = value[0] * value[2] * k_norm[tx]
                            value[1] = value[1] * value[2] * k_norm[half + tx]
                        value[2] = rope[T.max(at[0], 0), tx]
                        value[3] = rope[T.max(at[0], 0), half + tx]
                        value[4] = value[0] * value[2] - value[1] * value[3]
                        value[5] = value[1] * value[2] + value[0] * value[3]
                    if queries:
                        q[by, bx * half * 2 + tx] = T.Cast(job.dtype, value[4])
                        q[by, bx * half * 2 + half + tx] = T.Cast(job.dtype, value[5])
                    else:
                        if at[0] >= 0:
                            at[1] = page_table[slots[by], at[0] // job.page_size]
                            at[2] = at[0] % job.page_size
                            if bx < kv:
                                k_cache[at[1], bx, at[2], tx] = T.Cast(job.kv_dtype, value[4])
                                k_cache[at[1], bx, at[2], half + tx] = T.Cast(job.kv_dtype, value[5])
                            else:
                                v_cache[at[1], bx - kv, at[2], tx] = T.Cast(job.kv_dtype, value[4])
                                v_cache[at[1], bx - kv, at[2], half + tx] = T.Cast(job.kv_dtype, value[5])

    return kernel
