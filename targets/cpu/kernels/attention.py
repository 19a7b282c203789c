"""Paged attention with a running softmax: one task for each row and key head, page by page."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.rope import cache_shape, keys_view
from nearfar.targets.jobs import Attention
from nearfar.targets.kernels import Stage, Staged

Expr = Any


def attention(job: Attention) -> Staged:
    """See Kernels.attention."""
    pages = tirx.Var("pages", "int32")
    args = [
        ("q", (job.m, job.heads * job.head_dim), job.dtype),
        ("k_cache", cache_shape(job, pages), job.kv_dtype),
        ("v_cache", cache_shape(job, pages), job.kv_dtype),
        ("positions", (256,), "int32"),
        ("slots", (256,), "int32"),
        ("page_table", (job.slots, job.pages_per_slot), "int32"),
        ("out", (job.m, job.heads * job.head_dim), job.dtype),
    ]

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        buf["keys"] = keys_view(job, buf["k_cache"], pages)
        with T.parallel(0, job.m * job.kv_heads) as task:
            _row(job, buf, T.Bind(task // job.kv_heads), T.Bind(task % job.kv_heads))

    return Staged((Stage(v.prim_func("attention", args, body), tuple(name for name, *_ in args)),))


def _row(job: Attention, buf: dict[str, Expr], m: Expr, kv_head: Expr) -> None:
    """All query heads of one key head, for one row; they share the loads of keys and values."""
    group, dv, pv = job.heads // job.kv_heads, job.head_dim // v.LANES, job.page_size // v.LANES
    position = T.Bind(buf["positions"][m])
    slot = T.Bind(buf["slots"][m])
    acc = v.local((group * dv,), v.F32X8)
    top = v.local((group,), "float32")
    total = v.local((group,), "float32")
    scores = v.local((group, job.page_size), "float32")
    with T.serial(0, group * dv) as i:
        v.put1(acc, [i], v.splat(0.0))
    with T.serial(0, group) as h:
        v.put1(top, [h], v.f32(-1e30))
        v.put1(total, [h], v.f32(0.0))
    with T.serial(0, (position + job.page_size) // job.page_size) as p:
        page = T.Bind(buf["page_table"][slot, p])
        count = T.Bind(tirx.min(position + 1 - p * job.page_size, job.page_size))
        with T.serial(0, group) as h:
            head = T.Bind((kv_head * group + h) * job.head_dim)
            s = v.registers(pv)
            for i in range(pv):
                v.put1(s, [i], v.splat(0.0))
            with T.serial(0, job.head_dim) as d:
                q = T.Bind(v.splat(buf["q"][m, head + d]))
                for i in range(pv):
                    v.put1(s, [i], s[i] + q * v.cast(v.lanes(buf["keys"], [page, kv_head, d, i * v.LANES]), v.F32X8))
            _softmax_step(job, s, scores, top, total, acc, h, count)
            with T.serial(0, count) as t:
                weight = T.Bind(v.splat(scores[h, t]))
                for i in range(dv):
                    value = v.cast(v.lanes(buf["v_cache"], [page, kv_head, t, i * v.LANES]), v.F32X8)
                    v.put1(acc, [h * dv + i], acc[h * dv + i] + weight * value)
    with T.serial(0, group) as h:
        inverse = T.Bind(tirx.Select(total[h] > v.f32(0.0), v.f32(1.0) / total[h], v.f32(0.0)))
        for i in range(dv):
            v.put(buf["out"], [m, (kv_head * group + h) * job.head_dim + i * v.LANES], acc[h * dv + i] * v.splat(inverse))


def _softmax_step(job: Attention, s: Expr, scores: Expr, top: Expr, total: Expr, acc: Expr, h: Expr, count: Expr) -> None:
    """Scores of one page to weights: raise the maximum, scale what was summed under the old one."""
    dv, pv = job.head_dim // v.LANES, job.page_size // v.LANES
    masked = []
    for i in range(pv):
        index = tirx.Ramp(v.i32(i * v.LANES), v.i32(1), v.LANES)
        masked.append(T.Bind(tirx.Select(index < v.splat(count), s[i] * v.splat(float(job.scale)), v.splat(-1e30))))
    largest = masked[0]
    for value in masked[1:]:
        largest = T.Bind(tirx.max(largest, value))
    new = T.Bind(tirx.max(top[h], v.hmax(largest)))
    shrink = T.Bind(v.exp(v.splat(top[h] - new)))
    weights = [v.exp(value - v.splat(new)) for value in masked]
    sums = weights[0]
    for value in weights[1:]:
        sums = T.Bind(sums + value)
    for i in range(pv):
        # exp(-1e30) is not quite 0: masked positions are also left out of the sum over values, by `count`
        v.put(scores, [h, i * v.LANES], weights[i])
    v.put1(total, [h], total[h] * tirx.Shuffle([shrink], [0]) + v.hsum(sums))
    v.put1(top, [h], new)
    for i in range(dv):
        v.put1(acc, [h * dv + i], acc[h * dv + i] * shrink)
