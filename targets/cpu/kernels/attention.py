"""Paged attention with a running softmax: one task for each row and key head, page by page.

The query heads of a key head go through a page together, as many as divide them and registers hold: a key is
loaded, and converted from float16, once for all of them, and their sums do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.activations import softcap
from nearfar.targets.cpu.kernels.paged import arguments, check, keys_view
from nearfar.targets.cpu.units import Unit
from nearfar.targets.jobs import Attend
from nearfar.targets.kernels import Stage, Staged

Expr = Any
NONE = -1e30  # stands for -inf where arithmetic follows
SUMS = 12  # vectors of outputs that are summed in one pass over a page's values, of the 16 registers of AVX2


def attention(job: Attend, unit: Unit) -> Staged:
    """See Attend."""
    check(job)
    args, pages = arguments(job)

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        buf["keys"] = keys_view(job, buf["k_cache"], pages)
        with T.parallel(0, job.m * job.kv_heads) as task:
            _row(job, buf, T.Bind(task // job.kv_heads), T.Bind(task % job.kv_heads))

    return Staged((Stage(v.prim_func("attention", args, body), tuple(name for name, *_ in args)),))


def _components(width: int, body: Callable[[Expr, int], None]) -> None:
    """Call body(start, lanes) over a head's components: vectors of 16, then of 8, 4 and 2 what is left."""
    with T.serial(0, width // v.LANES) as i:
        body(i * v.LANES, v.LANES)
    at = width - width % v.LANES
    for lanes in (8, 4, 2):
        if width - at >= lanes:
            body(v.i32(at), lanes)
            at += lanes


@dataclass(frozen=True)
class _Sums:
    """The running softmax of one row and key head, for each of its query heads.

    `acc` [group, head_dim]: Σ weight·value under the maximum `top` [group]; `total` [group]: Σ weight;
    `weights` [group, page_size]: those of the page at hand.
    """

    acc: Expr
    top: Expr
    total: Expr
    weights: Expr


def _tile(group: int) -> int:
    """Query heads that go through a page together; seven have 14 vectors of scores in registers."""
    return next(tile for tile in range(7, 0, -1) if group % tile == 0)


def _row(job: Attend, buf: dict[str, Expr], m: Expr, kv_head: Expr) -> None:
    """All query heads of one key head, for one row."""
    group, d, size = job.heads // job.kv_heads, job.head_dim, job.page_size
    position = T.Bind(buf["positions"][m])
    slot = T.Bind(buf["slots"][m])
    sums = _Sums(*(v.local(shape, "float32") for shape in ((group, d), (group,), (group,), (group, size))))
    with T.serial(0, group) as h:
        _components(d, lambda start, n: v.put(sums.acc, [h, start], v.splat(0.0, n), n))
        # A sink is a logit that has been summed already.
        sink = tirx.max(buf["sinks"][kv_head * group + h], v.f32(NONE)) if job.sinks else v.f32(NONE)
        v.put1(sums.top, [h], sink)
        v.put1(sums.total, [h], v.f32(1.0 if job.sinks else 0.0))
    first = v.i32(0) if job.window is None else T.Bind(tirx.max(position + 1 - job.window, 0))
    first_page = T.Bind(first // size)
    tile = _tile(group)
    with T.serial(0, (position + size) // size - first_page) as turn:
        p = T.Bind(first_page + turn)
        page = T.Bind(buf["page_table"][slot, p])
        begin = T.Bind(tirx.max(first - p * size, 0)) if job.window is not None else v.i32(0)
        end = T.Bind(tirx.min(position + 1 - p * size, size))
        with T.serial(0, group // tile) as tile_of:
            heads = [T.Bind(tile_of * tile + j) for j in range(tile)]
            first_q = [T.Bind((kv_head * group + h) * d) for h in heads]
            scores = _scores(job, [(buf["q"], m, at) for at in first_q], buf["keys"], page, kv_head)
            for h, values in zip(heads, scores, strict=True):
                _softmax_step(job, values, sums, h, begin, end)
            _add_values(job, buf["v_cache"], sums, heads, page, kv_head, begin, end)
    with T.serial(0, group) as h:
        inverse = T.Bind(tirx.Select(sums.total[h] > v.f32(0.0), v.f32(1.0) / sums.total[h], v.f32(0.0)))

        def finish(start: Expr, n: int) -> None:
            value = v.lanes(sums.acc, [h, start], n) * v.splat(inverse, n)
            v.put(buf["out"], [m, (kv_head * group + h) * d + start], value, n)

        _components(d, finish)


def _scores(
    job: Attend, queries: list[tuple[Expr, Expr, Expr]], keys: Expr, page: Expr, kv_head: Expr
) -> list[list[Expr]]:
    """Of each query (q, its row, its first column) with the positions of a page, in vectors of 16."""
    pv, tile = job.page_size // v.LANES, len(queries)
    # Few heads have few sums, and an addition waits for the one before it: components are then summed in
    # turns.
    turns = next((turns for turns in (4, 2) if turns * tile <= 4 and job.head_dim % turns == 0), 1)
    s = v.registers(turns * tile * pv)
    for i in range(turns * tile * pv):
        v.put1(s, [i], v.splat(0.0))
    with T.serial(0, job.head_dim // turns) as step:
        for turn in range(turns):
            d = T.Bind(step * turns + turn)
            key = [v.cast(v.lanes(keys, [page, kv_head, d, i * v.LANES]), v.F32X16) for i in range(pv)]
            for j, (q, m, first) in enumerate(queries):
                component = T.Bind(v.splat(q[m, first + d]))
                for i in range(pv):
                    at = (turn * tile + j) * pv + i
                    v.put1(s, [at], s[at] + component * key[i])

    def score(j: int, i: int) -> Expr:
        total = s[j * pv + i]
        for turn in range(1, turns):
            total = total + s[(turn * tile + j) * pv + i]
        scaled = total * v.splat(float(job.scale))
        return scaled if job.softcap is None else softcap(scaled, job.softcap)

    return [[score(j, i) for i in range(pv)] for j in range(tile)]


def _softmax_step(job: Attend, s: list[Expr], sums: _Sums, h: Expr, begin: Expr, end: Expr) -> None:
    """Scores of a page's positions begin … end to weights: raise the maximum, scale what was summed."""
    masked = []
    for i, value in enumerate(s):
        index = tirx.Ramp(v.i32(i * v.LANES), v.i32(1), v.LANES)
        seen = index < v.splat(end)
        if job.window is not None:
            seen = tirx.all(seen, index >= v.splat(begin))
        masked.append(v.keep(tirx.Select(seen, value, v.splat(NONE))))
    largest = masked[0]
    for value in masked[1:]:
        largest = T.Bind(tirx.max(largest, value))
    new = T.Bind(tirx.max(sums.top[h], v.hmax(largest)))
    shrink = T.Bind(v.exp(v.splat(sums.top[h] - new)))
    weights = [v.exp(value - v.splat(new)) for value in masked]
    added = weights[0]
    for value in weights[1:]:
        added = T.Bind(added + value)
    for i, value in enumerate(weights):
        # exp(-1e30) is not quite 0: masked positions are also left out of the sum over values
        v.put(sums.weights, [h, i * v.LANES], value)
    one = T.Bind(tirx.Shuffle([shrink], [0]))
    v.put1(sums.total, [h], sums.total[h] * one + v.hsum(added))
    v.put1(sums.top, [h], new)

    def shrunk(start: Expr, n: int) -> None:
        v.put(sums.acc, [h, start], v.lanes(sums.acc, [h, start], n) * v.splat(one, n), n)

    _components(job.head_dim, shrunk)


def _add_values(
    job: Attend,
    values: Expr,
    sums: _Sums,
    heads: list[Expr],
    page: Expr,
    kv_head: Expr,
    begin: Expr,
    end: Expr,
) -> None:
    """Weight·value to `acc` over a page's positions begin … end, some components of the heads in a pass."""
    vectors = job.head_dim // v.LANES
    each = next(each for each in range(max(1, SUMS // len(heads)), 0, -1) if vectors % each == 0)

    def add(pieces: list[tuple[Expr, int]]) -> None:
        with T.serial(0, end - begin) as turn:
            t = T.Bind(begin + turn)
            weights = [T.Bind(sums.weights[h, t]) for h in heads]
            for start, n in pieces:
                value = T.Bind(v.cast(v.lanes(values, [page, kv_head, t, start], n), f"float32x{n}"))
                for h, weight in zip(heads, weights, strict=True):
                    v.put(
                        sums.acc, [h, start], v.lanes(sums.acc, [h, start], n) + v.splat(weight, n) * value, n
                    )

    with T.serial(0, vectors // each) as some:
        add([((some * each + i) * v.LANES, v.LANES) for i in range(each)])
    at, rest = vectors * v.LANES, []
    for n in (8, 4, 2):
        if job.head_dim - at >= n:
            rest.append((v.i32(at), n))
            at += n
    if rest:
        add(rest)
