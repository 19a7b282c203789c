"""Rotate q and k by position and append k and v to the paged cache."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.targets.jobs import Attention
from nearfar.targets.kernels import Stage, Staged

from .common import ceil_div, f32, select, stored

THREADS = 64
FLAT = ("positions", "slots", "page_table", "rope", "k_cache", "v_cache", "q")


def rope_append(job: Attention, qk_norm: float | None) -> Staged:
    """One launch; with the norm of q and k another before it, since together they have more than the eight buffers of a kernel."""
    flat = select(_flat(job), ["qkv", *FLAT], "rope_append")
    if qk_norm is None:
        return Staged((Stage(flat, ("qkv", *FLAT)),))
    norm = select(_normed(job, qk_norm), ["qkv", "q_norm", "k_norm", "out"], "qk_norm")
    stages = (Stage(norm, ("qkv", "q_norm", "k_norm", "scratch:0")), Stage(flat, ("scratch:0", *FLAT)))
    return Staged(stages, (((job.m, (job.heads + 2 * job.kv_heads) * job.head_dim), job.dtype),))


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
                        q[at[0], at[1] * half * 2 + at[2]] = stored(value[4], job.dtype)
                        q[at[0], at[1] * half * 2 + half + at[2]] = stored(value[5], job.dtype)
                    else:
                        if at[3] >= 0:
                            at[4] = page_table[slots[at[0]], at[3] // job.page_size]
                            at[5] = at[3] % job.page_size
                            if at[1] < heads + kv:
                                k_cache[at[4], at[1] - heads, at[5], at[2]] = stored(value[4], job.kv_dtype)
                                k_cache[at[4], at[1] - heads, at[5], half + at[2]] = stored(value[5], job.kv_dtype)
                            else:
                                v_cache[at[4], at[1] - heads - kv, at[5], at[2]] = stored(value[4], job.kv_dtype)
                                v_cache[at[4], at[1] - heads - kv, at[5], half + at[2]] = stored(value[5], job.kv_dtype)

    return kernel


def _normed(job: Attention, eps: float) -> tirx.PrimFunc:
    """A workgroup a row's head: q and k times the weight of their norm over the root of their mean square, v as it is."""
    m, heads, kv, half = job.m, job.heads, job.kv_heads, job.head_dim // 2
    all_heads = heads + 2 * kv

    @T.prim_func(check_well_formed=False)
    def kernel(
        qkv: T.Buffer((m, all_heads * half * 2), job.dtype),
        q_norm: T.Buffer((half * 2,), "float32"),
        k_norm: T.Buffer((half * 2,), "float32"),
        out: T.Buffer((m, all_heads * half * 2), job.dtype),
    ):
        for bx in T.thread_binding(all_heads, thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(half, thread="threadIdx.x"):
                    squares = T.alloc_shared((half,), "float32")
                    value = T.alloc_local((3,), "float32")
                    value[0] = f32(qkv[by, bx * half * 2 + tx])
                    value[1] = f32(qkv[by, bx * half * 2 + half + tx])
                    squares[tx] = value[0] * value[0] + value[1] * value[1]
                    T.tvm_storage_sync("shared")
                    if bx < heads + kv:
                        value[2] = T.float32(0)
                        for t in T.serial(half):
                            value[2] = value[2] + squares[t]
                        value[2] = T.rsqrt(value[2] * T.float32(0.5 / half) + T.float32(eps))
                        if bx < heads:
                            value[0] = value[0] * value[2] * q_norm[tx]
                            value[1] = value[1] * value[2] * q_norm[half + tx]
                        else:
                            value[0] = value[0] * value[2] * k_norm[tx]
                            value[1] = value[1] * value[2] * k_norm[half + tx]
                    out[by, bx * half * 2 + tx] = stored(value[0], job.dtype)
                    out[by, bx * half * 2 + half + tx] = stored(value[1], job.dtype)

    return kernel
