"""Norms and rotation of q and k by position, and the append of k and v to the paged cache."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: SIM102
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.errors import BuildError
from nearfar.format.kv import BITS
from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import RopeAppend
from nearfar.kernels.jobs.names import Output
from nearfar.targets.gpu.kernels.append import rope_codes
from nearfar.targets.gpu.kernels.append.rows import rows
from nearfar.targets.gpu.kernels.common import ceil_div, f32, select, stored
from nearfar.targets.gpu.kernels.norm import threads_for
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import of_numbers

THREADS = 64


def check_rope(job: RopeAppend) -> None:
    """BuildError for queries whose scaling starts at a fraction of a position."""
    if job.q_scale is not None and job.q_scale[1] != int(job.q_scale[1]):
        original = job.q_scale[1]
        raise BuildError(f"q_scale: {original} positions: the GPU targets need a whole number")


def rope_append(job: RopeAppend) -> Staged:
    """The launches of a RopeAppend job: one, with another before it for norms, and another for a quantized
    cache.

    Together they have more than the eight buffers of a kernel. Values between them are float32, in f16
    programs too.
    """
    normed = job.norm_eps is not None or job.v_norm_eps is not None
    rotated_early = job.rope and job.norm_eps is not None and job.norm_after
    rotated = job.rope and not rotated_early
    stages: list[Stage] = []
    scratch: list[Output] = []
    given = {name: name for name in (*job.inputs(), "out")}
    if normed:
        names = [
            "x",
            *["positions", "rope"] * rotated_early,
            *(n for n in job.inputs() if n in ("q_norm", "k_norm")),
        ]
        given["x"] = f"scratch:{len(scratch)}"
        func = select(_normed(job, rotated_early), [*names, "out"], "qk_norm")
        stages.append(Stage(func, (*names, given["x"])))
        scratch.append(((job.m, job.x_heads * job.head_dim), "float32"))
    x_dtype = "float32" if normed else job.dtype
    if job.append and job.kv_dtype in BITS:
        facts = rope_codes.described(job, rotated)
        given["rows"] = f"scratch:{len(scratch)}"
        (each,) = rows(facts).stages
        stages.append(Stage(each.func, (*each.args[:-1], given["rows"])))
        scratch.append(facts.out)
        func = rope_codes.appended(job, x_dtype, rotated)
        names = ["x", "rows", *["k_rounding"] * job.rounds_keys, "k_cache", "v_cache", "out"]
    else:
        func = _appended(job, x_dtype, rotated)
        left_out = ("q_norm", "k_norm", *(() if rotated else ("rope",)))
        names = [name for name in given if name not in left_out]
    last = of_numbers(select(func, names, "rope_append"))
    return Staged((*stages, Stage(last, tuple(given[name] for name in names))), tuple(scratch))


def _appended(job: RopeAppend, x_dtype: str, rotated: bool) -> tirx.PrimFunc:
    """The kernel with a thread for each pair (i, i + head_dim/2) of a row's head; heads are in the order q,
    k, v.
    """
    m, heads, kv, half = job.m, job.heads, job.kv_heads, job.head_dim // 2
    all_heads = job.x_heads
    turning = heads + kv if job.append else heads  # heads that are rotated
    total = m * all_heads * half
    beta, original = job.q_scale or (0.0, 1.0)

    @prim_func
    def kernel(
        x: T.Buffer((m, all_heads * half * 2), x_dtype),
        positions: T.Buffer((MAX_STEP,), "int32"),
        slots: T.Buffer((MAX_STEP,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        rope_h: T.handle,
        k_h: T.handle,
        v_h: T.handle,
        out: T.Buffer((m, heads * half * 2), job.dtype),
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
                at[0] = (bx * THREADS + tx) // (all_heads * half)  # the row
                at[1] = (bx * THREADS + tx) % (all_heads * half) // half  # the head
                at[2] = (bx * THREADS + tx) % half  # the pair of values in the head
                if at[0] < m:
                    at[3] = positions[at[0]]
                    value[0] = f32(x[at[0], at[1] * half * 2 + at[2]])
                    value[1] = f32(x[at[0], at[1] * half * 2 + half + at[2]])
                    value[4] = value[0]
                    value[5] = value[1]
                    if rotated:
                        if at[1] < turning:
                            value[2] = rope[T.max(at[3], 0), at[2]]
                            value[3] = rope[T.max(at[3], 0), half + at[2]]
                            value[4] = value[0] * value[2] - value[1] * value[3]
                            value[5] = value[1] * value[2] + value[0] * value[3]
                    if job.q_scale is not None:
                        if at[1] < heads:
                            value[2] = f32(1 + T.max(at[3], 0) // int(original))
                            value[2] = T.float32(1) + T.float32(beta) * T.log(value[2])
                            value[4] = value[4] * value[2]
                            value[5] = value[5] * value[2]
                    if at[1] < heads:
                        out[at[0], at[1] * half * 2 + at[2]] = stored(value[4], job.dtype)
                        out[at[0], at[1] * half * 2 + half + at[2]] = stored(value[5], job.dtype)
                    else:
                        if job.append:
                            if at[3] >= 0:
                                at[4] = page_table[slots[at[0]], at[3] // job.page_size]
                                at[5] = at[3] % job.page_size
                                if at[1] < heads + kv:
                                    k_cache[at[4], at[1] - heads, at[5], at[2]] = stored(
                                        value[4], job.kv_dtype
                                    )
                                    k_cache[at[4], at[1] - heads, at[5], half + at[2]] = stored(
                                        value[5], job.kv_dtype
                                    )
                                else:
                                    v_cache[at[4], at[1] - heads - kv, at[5], at[2]] = stored(
                                        value[4], job.kv_dtype
                                    )
                                    v_cache[at[4], at[1] - heads - kv, at[5], half + at[2]] = stored(
                                        value[5], job.kv_dtype
                                    )

    return kernel


def _normed(job: RopeAppend, rotated: bool) -> tirx.PrimFunc:
    """The kernel with a workgroup for each part that is normed separately: a head, or with `norm_all` all
    heads of q or of k.

    Other heads are copied. `rotated`: q and k are rotated before they are normed. A thread has pairs (i, i +
    head_dim/2).
    """
    m, heads, kv, half = job.m, job.heads, job.kv_heads, job.head_dim // 2
    all_heads, keys = job.x_heads, job.kv_heads * job.append
    normed = job.norm_eps is not None
    whole = normed and job.norm_all
    # the number of parts of q and k; each head of v is one part
    q_parts, k_parts = (1, int(job.append)) if whole else (heads, keys)
    q_length, k_length = (heads, kv) if whole else (1, 1)  # the number of heads in a part
    longest = max(q_length, k_length) * half
    threads = min(threads_for(longest * 2), longest)
    turns = ceil_div(longest, threads)

    def mean(total, bx):
        """The mean of squares of a part of q or k, from their sum."""
        if not whole:
            return total * T.float32(0.5 / half)
        q_factor, k_factor = T.float32(0.5 / half / heads), T.float32(0.5 / half / kv)
        return total * T.Select(bx < 1, q_factor, k_factor)

    def one_of(bx, q_value, k_value, v_value):
        """The value for the kind of a workgroup's part: q, k or v."""
        return T.Select(bx < q_parts, q_value, T.Select(bx < q_parts + k_parts, k_value, v_value))

    def first_head(bx):
        return one_of(bx, 0, heads, bx - 2 + heads + kv) if whole else bx

    @prim_func
    def kernel(
        x: T.Buffer((m, all_heads * half * 2), job.dtype),
        positions: T.Buffer((MAX_STEP,), "int32"),
        rope_h: T.handle,
        q_norm: T.Buffer((half * 2 * q_length,), "float32"),
        k_norm: T.Buffer((half * 2 * k_length,), "float32"),
        out: T.Buffer((m, all_heads * half * 2), "float32"),
    ):
        context = T.int32()
        rope = T.match_buffer(rope_h, (context, half * 2), "float32")
        for bx in T.thread_binding(q_parts + k_parts + keys, thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(threads, thread="threadIdx.x"):
                    squares = T.alloc_shared((threads,), "float32")
                    pair = T.alloc_local((2 * turns,), "float32")
                    value = T.alloc_local((4,), "float32")
                    at = T.alloc_local((4,), "int32")
                    at[0] = first_head(bx)
                    at[1] = one_of(bx, q_length, k_length, 1) * half  # the first pair of the part
                    value[0] = T.float32(0)
                    for t in T.unroll(turns):
                        at[2] = t * threads + tx
                        if at[2] < at[1]:
                            at[3] = (at[0] + at[2] // half) * half * 2 + at[2] % half
                            pair[t * 2] = f32(x[by, at[3]])
                            pair[t * 2 + 1] = f32(x[by, at[3] + half])
                            if rotated:
                                if bx < q_parts + k_parts:
                                    value[1] = rope[T.max(positions[by], 0), at[2] % half]
                                    value[2] = rope[T.max(positions[by], 0), half + at[2] % half]
                                    value[3] = pair[t * 2] * value[1] - pair[t * 2 + 1] * value[2]
                                    pair[t * 2 + 1] = pair[t * 2 + 1] * value[1] + pair[t * 2] * value[2]
                                    pair[t * 2] = value[3]
                            value[0] = (
                                value[0] + pair[t * 2] * pair[t * 2] + pair[t * 2 + 1] * pair[t * 2 + 1]
                            )
                    squares[tx] = value[0]
                    T.tvm_storage_sync("shared")
                    value[0] = T.float32(0)
                    for t in T.serial(threads):
                        value[0] = value[0] + squares[t]
                    value[1] = T.float32(1)
                    if bx < q_parts + k_parts:
                        if normed:
                            value[1] = T.rsqrt(mean(value[0], bx) + T.float32(job.norm_eps or 0.0))
                    else:
                        if job.v_norm_eps is not None:
                            value[1] = T.rsqrt(
                                value[0] * T.float32(0.5 / half) + T.float32(job.v_norm_eps or 0.0)
                            )
                    for t in T.unroll(turns):
                        at[2] = t * threads + tx
                        if at[2] < at[1]:
                            value[2] = value[1]
                            value[3] = value[1]
                            at[3] = at[2] // half * half * 2 + at[2] % half  # index in the part
                            if normed:
                                if bx < q_parts:
                                    value[2] = value[1] * q_norm[at[3]]
                                    value[3] = value[1] * q_norm[at[3] + half]
                                else:
                                    if job.append:
                                        if bx < q_parts + k_parts:
                                            value[2] = value[1] * k_norm[at[3]]
                                            value[3] = value[1] * k_norm[at[3] + half]
                            out[by, at[0] * half * 2 + at[3]] = pair[t * 2] * value[2]
                            out[by, at[0] * half * 2 + at[3] + half] = pair[t * 2 + 1] * value[3]

    return kernel
