"""Rotate queries and keys, append keys and values to the paged cache."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.jobs import Attention
from nearfar.targets.kernels import Stage, Staged

Expr = Any


def cache_shape(job: Attention, pages: Expr) -> tuple[Expr, ...]:
    """The cache of one layer as the kernels see it: keys are transposed within a page, values are not.

    With positions innermost, a vector load gives one component of 8 keys, and scores need no horizontal sums. The runtime copies
    whole pages; only its snapshots look inside (docs/artifact.md, `kv.L.k`).
    """
    return (pages, job.kv_heads, job.page_size, job.head_dim)


def keys_view(job: Attention, cache: Expr, pages: Expr) -> Expr:
    """The key cache with positions innermost: [pages, kv_heads, head_dim, page_size]."""
    return T.decl_buffer((pages, job.kv_heads, job.head_dim, job.page_size), job.kv_dtype, data=cache.data)


def rope_append(job: Attention, qk_norm: float | None) -> Staged:
    """See Kernels.rope_append."""
    pages, context = tirx.Var("pages", "int32"), tirx.Var("context", "int32")
    width = (job.heads + 2 * job.kv_heads) * job.head_dim
    args: list[tuple[str, tuple[Any, ...], str]] = [
        ("qkv", (job.m, width), job.dtype),
        ("positions", (256,), "int32"),
        ("slots", (256,), "int32"),
        ("page_table", (job.slots, job.pages_per_slot), "int32"),
        ("rope", (context, job.head_dim), "float32"),
    ]
    if qk_norm is not None:
        args += [("q_norm", (job.head_dim,), "float32"), ("k_norm", (job.head_dim,), "float32")]
    args += [
        ("k_cache", cache_shape(job, pages), job.kv_dtype),
        ("v_cache", cache_shape(job, pages), job.kv_dtype),
        ("q", (job.m, job.heads * job.head_dim), job.dtype),
    ]

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        buf["keys"] = keys_view(job, buf["k_cache"], pages)
        loop = T.parallel if job.m >= 16 else T.serial  # few rows take less time than waking a thread
        with loop(0, job.m) as m:
            _row(job, qk_norm, buf, m)

    return Staged((Stage(v.prim_func("rope_append", args, body), tuple(name for name, *_ in args)),))


def _row(job: Attention, qk_norm: float | None, buf: dict[str, Expr], m: Expr) -> None:
    qkv, rope, d = buf["qkv"], buf["rope"], job.head_dim
    position = T.Bind(buf["positions"][m])
    at = T.Bind(tirx.max(position, 0))

    def rotated(head: Expr, norm: str, scale: Expr, i: Expr) -> tuple[Expr, Expr]:
        a, b = qkv[m, head * d + i] * scale, qkv[m, head * d + d // 2 + i] * scale
        if qk_norm is not None:
            a, b = a * buf[norm][i], b * buf[norm][d // 2 + i]
        a, b = T.Bind(a), T.Bind(b)
        cos, sin = T.Bind(rope[at, i]), T.Bind(rope[at, d // 2 + i])
        return a * cos - b * sin, b * cos + a * sin

    with T.serial(0, job.heads) as head:
        scale = _head_scale(job, qk_norm, qkv, m, head)
        with T.serial(0, d // 2) as i:
            low, high = rotated(head, "q_norm", scale, i)
            v.put1(buf["q"], [m, head * d + i], low)
            v.put1(buf["q"], [m, head * d + d // 2 + i], high)
    with T.If(position >= 0), T.Then():
        page = T.Bind(buf["page_table"][buf["slots"][m], position // job.page_size])
        offset = T.Bind(position % job.page_size)
        with T.serial(0, job.kv_heads) as head:
            scale = _head_scale(job, qk_norm, qkv, m, head + job.heads)
            with T.serial(0, d // 2) as i:
                low, high = rotated(head + job.heads, "k_norm", scale, i)
                v.put1(buf["keys"], [page, head, i, offset], tirx.Cast(job.kv_dtype, low))
                v.put1(buf["keys"], [page, head, d // 2 + i, offset], tirx.Cast(job.kv_dtype, high))
            with T.serial(0, d) as i:
                value = qkv[m, (head + job.heads + job.kv_heads) * d + i]
                v.put1(buf["v_cache"], [page, head, offset, i], tirx.Cast(job.kv_dtype, value))


def _head_scale(job: Attention, qk_norm: float | None, qkv: Expr, m: Expr, head: Expr) -> Expr:
    """1 / rms of one head (1 without qk_norm)."""
    if qk_norm is None:
        return v.f32(1.0)
    total = v.scalar("float32")
    v.put1(total, [0], v.f32(0.0))
    with T.serial(0, job.head_dim) as i:
        value = T.Bind(qkv[m, head * job.head_dim + i])
        v.put1(total, [0], total[0] + value * value)
    return T.Bind(v.f32(1.0) / tirx.sqrt(total[0] * v.f32(1.0 / job.head_dim) + v.f32(qk_norm)))
