"""Paged attention with a running softmax: one task for each row and key head, page by page."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.activations import softcap
from nearfar.targets.cpu.kernels.paged import arguments, check, keys_view
from nearfar.targets.jobs import Attend
from nearfar.targets.kernels import Stage, Staged

Expr = Any
NONE = -1e30  # stands for -inf where arithmetic follows
SUMS = 16  # vectors of a head's output that are summed in one pass over a page's values: about what registers hold


def attention(job: Attend) -> Staged:
    """See Attend."""
    check(job)
    args, pages = arguments(job)

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        buf["keys"] = keys_view(job, buf["k_cache"], pages)
        with T.parallel(0, job.m * job.kv_heads) as task:
            _row(job, buf, T.Bind(task // job.kv_heads), T.Bind(task % job.kv_heads))

    return Staged((Stage(v.prim_func("attention", args, body), tuple(name for name, *_ in args)),))


def _chunks(width: int) -> list[tuple[int, int]]:
    """(start, lanes) of the vectors that a head's components make: of 8 lanes, and where they do not come out of 4 and 2."""
    starts, at = [], 0
    for lanes in (v.LANES, 4, 2):
        while width - at >= lanes:
            starts.append((at, lanes))
            at += lanes
    return starts


def _row(job: Attend, buf: dict[str, Expr], m: Expr, kv_head: Expr) -> None:
    """All query heads of one key head, for one row; they share the loads of keys and values."""
    group, d, size, chunks = job.heads // job.kv_heads, job.head_dim, job.page_size, _chunks(job.head_dim)
    position = T.Bind(buf["positions"][m])
    slot = T.Bind(buf["slots"][m])
    acc = v.local((group, d), "float32")
    top = v.local((group,), "float32")
    total = v.local((group,), "float32")
    scores = v.local((group, size), "float32")
    with T.serial(0, group) as h:
        for start, n in chunks:
            v.put(acc, [h, start], v.splat(0.0, n), n)
        # A sink is a logit that has been summed already.
        sink = tirx.max(buf["sinks"][kv_head * group + h], v.f32(NONE)) if job.sinks else v.f32(NONE)
        v.put1(top, [h], sink)
        v.put1(total, [h], v.f32(1.0 if job.sinks else 0.0))
    first = T.Bind(tirx.max(position + 1 - job.window, 0)) if job.window is not None else v.i32(0)
    first_page = T.Bind(first // size) if job.window is not None else v.i32(0)
    with T.serial(0, (position + size) // size - first_page) as turn:
        p = T.Bind(first_page + turn) if job.window is not None else turn
        page = T.Bind(buf["page_table"][slot, p])
        begin = T.Bind(tirx.max(first - p * size, 0)) if job.window is not None else None
        end = T.Bind(tirx.min(position + 1 - p * size, size))
        with T.serial(0, group) as h:
            s = _scores(job, buf, m, page, kv_head, h)
            _softmax_step(job, s, scores, top, total, acc, h, begin, end)
            for passed in range(0, len(chunks), SUMS):
                with T.serial(0, end if begin is None else end - begin) as turn_t:
                    t = turn_t if begin is None else T.Bind(begin + turn_t)
                    weight = T.Bind(scores[h, t])
                    for start, n in chunks[passed : passed + SUMS]:
                        value = v.cast(v.lanes(buf["v_cache"], [page, kv_head, t, start], n), f"float32x{n}")
                        v.put(acc, [h, start], v.lanes(acc, [h, start], n) + v.splat(weight, n) * value, n)
    with T.serial(0, group) as h:
        inverse = T.Bind(tirx.Select(total[h] > v.f32(0.0), v.f32(1.0) / total[h], v.f32(0.0)))
        for start, n in chunks:
            value = v.lanes(acc, [h, start], n) * v.splat(inverse, n)
            v.put(buf["out"], [m, (kv_head * group + h) * d + start], value, n)


def _scores(job: Attend, buf: dict[str, Expr], m: Expr, page: Expr, kv_head: Expr, h: Expr) -> list[Expr]:
    """Of query head h of the group with the positions of a page, in vectors of 8."""
    pv = job.page_size // v.LANES
    head = T.Bind((kv_head * (job.heads // job.kv_heads) + h) * job.head_dim)
    s = v.registers(pv)
    for i in range(pv):
        v.put1(s, [i], v.splat(0.0))
    with T.serial(0, job.head_dim) as d:
        q = T.Bind(v.splat(buf["q"][m, head + d]))
        for i in range(pv):
            v.put1(s, [i], s[i] + q * v.cast(v.lanes(buf["keys"], [page, kv_head, d, i * v.LANES]), v.F32X8))
    scaled = [s[i] * v.splat(float(job.scale)) for i in range(pv)]
    return scaled if job.softcap is None else [softcap(value, job.softcap) for value in scaled]


def _softmax_step(
    job: Attend,
    s: list[Expr],
    scores: Expr,
    top: Expr,
    total: Expr,
    acc: Expr,
    h: Expr,
    begin: Expr | None,
    end: Expr,
) -> None:
    """Scores of a page's positions begin … end to weights: raise the maximum, scale what was summed under the old one."""
    masked = []
    for i, value in enumerate(s):
        index = tirx.Ramp(v.i32(i * v.LANES), v.i32(1), v.LANES)
        seen = (
            index < v.splat(end) if begin is None else tirx.all(index < v.splat(end), index >= v.splat(begin))
        )
        masked.append(v.keep(tirx.Select(seen, value, v.splat(NONE))))
    largest = masked[0]
    for value in masked[1:]:
        largest = T.Bind(tirx.max(largest, value))
    new = T.Bind(tirx.max(top[h], v.hmax(largest)))
    shrink = T.Bind(v.exp(v.splat(top[h] - new)))
    weights = [v.exp(value - v.splat(new)) for value in masked]
    sums = weights[0]
    for value in weights[1:]:
        sums = T.Bind(sums + value)
    for i, value in enumerate(weights):
        # exp(-1e30) is not quite 0: masked positions are also left out of the sum over values
        v.put(scores, [h, i * v.LANES], value)
    one = T.Bind(tirx.Shuffle([shrink], [0]))
    v.put1(total, [h], total[h] * one + v.hsum(sums))
    v.put1(top, [h], new)
    for start, n in _chunks(job.head_dim):
        v.put(acc, [h, start], v.lanes(acc, [h, start], n) * v.splat(one, n), n)
