"""Norms and rotation of queries and keys, and the append of keys and values to the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import RopeAppend
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.half import stored
from nearfar.targets.cpu.kernels.paged import arguments, caches, check
from nearfar.targets.cpu.kernels.quantized_kv import PageLayout, put_row
from nearfar.targets.cpu.units import Unit

Expr = Any
Pair = tuple[Expr, Expr]


def rope_append(job: RopeAppend, unit: Unit) -> Staged:
    """The launch of a RopeAppend job."""
    check(job)
    job = opened(job)
    args, pages = arguments(job)

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        if job.append:
            buf |= caches(job, unit, buf, pages)
        with v.rows(job.m) as m:
            _row(job, unit, buf, m)

    return Staged((Stage(v.prim_func("rope_append", args, body), tuple(name for name, *_ in args)),))


def _row(job: RopeAppend, unit: Unit, buf: dict[str, Expr], m: Expr) -> None:
    d = job.head_dim
    position = T.Bind(buf["positions"][m])
    factor = _q_factor(job, position)

    def put_q(head: Expr, i: Expr, value: Expr) -> None:
        v.put1(buf["out"], [m, head * d + i], value if factor is None else value * factor)

    _turned(job, buf, m, position, "q_norm", job.heads, v.i32(0), put_q)
    if not job.append:
        return
    with T.If(position >= 0), T.Then():
        page = T.Bind(buf["page_table"][buf["slots"][m], position // job.page_size])
        offset = T.Bind(position % job.page_size)

        keys, values = _into(job, unit, buf, page, offset)
        _turned(job, buf, m, position, "k_norm", job.kv_heads, v.i32(job.heads), keys.put, keys.end)
        with T.serial(0, job.kv_heads) as head:
            first = (head + job.heads + job.kv_heads) * d
            scale = None
            if job.v_norm_eps is not None:
                scale = _scale(job.v_norm_eps, (1, d), lambda _, i: (buf["x"][m, first + i],))
            with T.serial(0, d) as i:
                value = buf["x"][m, first + i]
                values.put(head, i, value if scale is None else value * scale)
            values.end(head)


@dataclass(frozen=True)
class _Put:
    """The destination of a row: put(head, i, value) takes each component, end(head) is called when a head is
    complete.
    """

    put: Callable[[Expr, Expr, Expr], None]
    end: Callable[[Expr], None] = lambda head: None


def _into(job: RopeAppend, unit: Unit, buf: dict[str, Expr], page: Expr, offset: Expr) -> tuple[_Put, _Put]:
    """The destinations of keys and values at a position of a page."""
    layout = PageLayout.of(job, unit)
    if layout is None:

        def put_k(head: Expr, i: Expr, value: Expr) -> None:
            v.put1(buf["keys"], [page, head, i, offset], stored(unit, job.kv_dtype, value))

        def put_v(head: Expr, i: Expr, value: Expr) -> None:
            v.put1(buf["values"], [page, head, offset, i], stored(unit, job.kv_dtype, value))

        return _Put(put_k), _Put(put_v)
    row, size, bytes_of = v.local((job.head_dim,), "float32"), job.page_size, layout.row

    def gather(_: Expr, i: Expr, value: Expr) -> None:
        v.put1(row, [i], value)

    def gather_k(head: Expr, i: Expr, value: Expr) -> None:
        gather(head, i, value - buf["k_rounding"][head * job.head_dim + i] if job.rounds_keys else value)

    def end_k(head: Expr) -> None:
        codes, pairs = buf["keys"]
        weights = None
        if job.rounds_keys:
            first = (job.kv_heads + head) * job.head_dim
            weights = lambda at: v.lanes(buf["k_rounding"], [first + at])  # noqa: E731
        put_row(
            layout, row,
            lambda byte, code: v.put1(codes, [page, head, byte * size + offset], code),
            lambda g, which, half: v.put1(pairs, [page, head, layout.key_pair(g, which, offset)], half),
            weights,
        )  # fmt: skip

    def end_v(head: Expr) -> None:
        codes, pairs = buf["values"]
        put_row(
            layout, row,
            lambda byte, code: v.put1(codes, [page, head, offset * bytes_of + byte], code),
            lambda g, which, half: v.put1(pairs, [page, head, layout.value_pair(offset, g) + which], half),
        )  # fmt: skip

    return _Put(gather_k, end_k), _Put(gather, end_v)


def _q_factor(job: RopeAppend, position: Expr) -> Expr | None:
    """The factor of queries, 1 + beta·ln(1 + ⌊position/original⌋); None if the job has none."""
    if job.q_scale is None:
        return None
    beta, original = job.q_scale
    periods = tirx.floor(tirx.Cast("float32", tirx.max(position, 0)) / v.f32(original))
    return T.Bind(v.f32(1.0) + v.f32(beta) * tirx.log(v.f32(1.0) + periods))


def _turned(
    job: RopeAppend, buf: dict[str, Expr], m: Expr, position: Expr, norm: str, heads: int, first: Expr,
    put: Callable[[Expr, Expr, Expr], None], end: Callable[[Expr], None] = lambda head: None,
) -> None:  # fmt: skip
    """Norm and rotation of heads first … first+heads of row m: calls put(head, i, value) for each component,
    then end(head).
    """
    x, d = buf["x"], job.head_dim
    at = T.Bind(tirx.max(position, 0))

    def raw(head: Expr, i: Expr) -> Pair:
        return x[m, (first + head) * d + i], x[m, (first + head) * d + d // 2 + i]

    def weighted(pair: Pair, scale: Expr, head: Expr, i: Expr) -> Pair:
        at_head = head * d if job.norm_all else 0
        low, high = pair
        return low * scale * buf[norm][at_head + i], high * scale * buf[norm][at_head + d // 2 + i]

    def rotated(pair: Pair, i: Expr) -> Pair:
        if not job.rope:
            return pair
        a, b = T.Bind(pair[0]), T.Bind(pair[1])
        cos, sin = T.Bind(buf["rope"][at, i]), T.Bind(buf["rope"][at, d // 2 + i])
        return a * cos - b * sin, b * cos + a * sin

    def normed(head: Expr, i: Expr) -> Pair:
        """The pair of values that the norm reads."""
        return rotated(raw(head, i), i) if job.norm_after else raw(head, i)

    eps, of_head, of_all = job.norm_eps, (1, d // 2), (heads, d // 2)
    whole = _scale(eps, of_all, normed) if eps is not None and job.norm_all else None
    with T.serial(0, heads) as head:
        scale = whole
        if eps is not None and not job.norm_all:
            scale = _scale(eps, of_head, lambda _, i: normed(head, i))
        with T.serial(0, d // 2) as i:
            if scale is None:
                pair = rotated(raw(head, i), i)
            elif job.norm_after:
                pair = weighted(rotated(raw(head, i), i), scale, head, i)
            else:
                pair = rotated(weighted(raw(head, i), scale, head, i), i)
            put(head, i, pair[0])
            put(head, d // 2 + i, pair[1])
        end(head)


def _scale(eps: float, shape: tuple[int, int], values: Callable[[Expr, Expr], tuple[Expr, ...]]) -> Expr:
    """1 / rms of the numbers that values(i, j) gives for all i, j of a shape."""
    total = v.scalar("float32")
    count = 0
    v.put1(total, [0], v.f32(0.0))
    with T.serial(0, shape[0]) as i, T.serial(0, shape[1]) as j:
        numbers = [T.Bind(value) for value in values(i, j)]
        count = shape[0] * shape[1] * len(numbers)
        for number in numbers:
            v.put1(total, [0], total[0] + number * number)
    return T.Bind(v.f32(1.0) / tirx.sqrt(total[0] * v.f32(1.0 / count) + v.f32(eps)))
