"""Chooses the experts of each row: scores of the router's logits, and the highest of them."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Route
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.units import Unit

Expr = Any
LOWEST = -3e38  # below every score: an expert that is chosen already, or is none


def route(job: Route, unit: Unit) -> Staged:
    """The launch of a Route job."""
    job = opened(job)
    shapes: dict[str, tuple[tuple[Any, ...], str]] = {
        "x": ((job.m, job.experts), "float32"), "positions": ((MAX_STEP,), "int32"),
        "bias": ((job.experts,), "float32"), "factors": ((job.experts,), "float32"), "out": job.out,
    }  # fmt: skip
    args = [(name, *shapes[name]) for name in (*job.inputs(), "out")]

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        with v.rows(job.m) as m, T.If(buf["positions"][m] >= 0):
            with T.Then():
                scores = _scores(job, buf["x"], m)
                _choose(job, buf, m, scores)
            with T.Else(), T.serial(0, job.top) as j:
                v.put1(buf["out"], [m, j], v.f32(-1.0))
                v.put1(buf["out"], [m, j + job.top], v.f32(0.0))

    return Staged((Stage(v.prim_func("route", args, body), tuple(name for name, *_ in args)),))


def _scores(job: Route, x: Expr, m: Expr) -> Expr:
    """The scores of a row, in whole vectors of which the last may end in lanes without meaning."""
    vectors = -(-job.experts // v.LANES)
    scores = v.local((vectors * v.LANES,), "float32")
    for i in range(vectors):
        count = min(v.LANES, job.experts - i * v.LANES)
        v.put(scores, [i * v.LANES], v.some(x, [m, v.i32(i * v.LANES)], count))
    if job.score == "sigmoid":
        with T.serial(0, vectors) as i:
            value = v.lanes(scores, [i * v.LANES])
            v.put(scores, [i * v.LANES], v.splat(1.0) / (v.splat(1.0) + v.exp(v.splat(0.0) - value)))
        return scores
    for i in range(job.experts, vectors * v.LANES):
        v.put1(scores, [v.i32(i)], v.f32(LOWEST))
    top, total = v.registers(1), v.registers(1)
    v.put1(top, [0], v.splat(LOWEST))
    v.put1(total, [0], v.splat(0.0))
    with T.serial(0, vectors) as i:
        v.put1(top, [0], tirx.max(top[0], v.lanes(scores, [i * v.LANES])))
    highest = T.Bind(v.hmax(T.Bind(top[0])))
    with T.serial(0, vectors) as i:
        power = v.keep(v.exp(v.lanes(scores, [i * v.LANES]) - v.splat(highest)))
        v.put(scores, [i * v.LANES], power)
        v.put1(total, [0], total[0] + power)
    added = T.Bind(v.hsum(T.Bind(total[0])))
    with T.serial(0, vectors) as i:
        v.put(scores, [i * v.LANES], v.lanes(scores, [i * v.LANES]) / v.splat(added))
    return scores


def _choose(job: Route, buf: dict[str, Expr], m: Expr, scores: Expr) -> None:
    """Write the numbers and weights of the experts with the highest scores, found one after the other."""
    keys, out = v.local((job.experts,), "float32"), buf["out"]
    with T.serial(0, job.experts) as e:
        v.put1(keys, [e], scores[e] + buf["bias"][e] if job.bias else scores[e])
    best, key, total = v.scalar("int32"), v.scalar("float32"), v.scalar("float32")
    v.put1(total, [0], v.f32(0.0))
    with T.serial(0, job.top) as j:
        v.put1(best, [0], v.i32(0))
        v.put1(key, [0], v.f32(LOWEST))
        with T.serial(0, job.experts) as e, T.If(keys[e] > key[0]), T.Then():
            v.put1(best, [0], e)
            v.put1(key, [0], keys[e])
        v.put1(keys, [best[0]], v.f32(LOWEST))
        v.put1(out, [m, j], tirx.Cast("float32", best[0]))
        weight = scores[best[0]]
        v.put1(out, [m, j + job.top], weight * buf["factors"][best[0]] if job.factors else weight)
        v.put1(total, [0], total[0] + scores[best[0]])
    factor = (
        T.Bind(v.f32(job.scale) / (total[0] + v.f32(job.normalize))) if job.normalize is not None else None
    )
    if factor is None and job.scale == 1.0:
        return
    with T.serial(0, job.top) as j:
        v.put1(out, [m, j + job.top], out[m, j + job.top] * (v.f32(job.scale) if factor is None else factor))
