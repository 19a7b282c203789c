"""Causal convolution of each column by itself: sixteen columns a turn, the rows of a step in order."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import Staged
from nearfar.kernels.jobs import Conv
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.activations import ACTIVATIONS
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.pages import launch
from nearfar.targets.cpu.units import Unit

Expr = Any


def conv(job: Conv, unit: Unit) -> Staged:
    """The launch of a Conv job."""
    job = opened(job)
    known = {
        "x": (job.m, job.width), "weight": (job.width * job.taps,), "bias": (job.width,),
        "cache": (tirx.Var("pages", "int32"), 1, job.page_size, job.width),
    }  # fmt: skip

    def body(buf: dict[str, Expr]) -> None:
        whole, rest = divmod(job.width, v.LANES)
        with v.parallel(whole + bool(rest)) as block:
            first = T.Bind(block * v.LANES)
            if not rest:
                _columns(job, buf, first, v.LANES)
            else:
                with T.If(block < whole):
                    with T.Then():
                        _columns(job, buf, first, v.LANES)
                    with T.Else():
                        _columns(job, buf, first, rest)

    return launch("conv", job, known, body)


def _columns(job: Conv, buf: dict[str, Expr], first: Expr, count: int) -> None:
    """`count` columns from `first` on, of all rows; `past` has x of the taps − 1 rows before a row."""
    taps, positions, slots = job.taps, buf["positions"], buf["slots"]
    weights, past = v.registers(taps), v.registers(taps)
    for tap in range(taps):
        v.put1(weights, [tap], _strided(buf["weight"], first * taps + tap, taps, count))
    bias = v.some(buf["bias"], [first], count) if job.bias else v.splat(0.0)

    def cached(position: Expr, slot: Expr) -> Expr:
        page = T.Bind(buf["page_table"][slot, position // job.page_size])
        return v.some(buf["cache"], [page, 0, position % job.page_size, first], count)

    with T.serial(0, job.m) as m:
        position, slot = T.Bind(positions[m]), T.Bind(slots[m])
        with T.If(position < 0):
            with T.Then():
                v.put_some(buf["out"], [m, first], v.splat(0.0), count)
            with T.Else():
                before = T.Bind(tirx.max(m - 1, 0))
                begins = tirx.any(m == 0, slots[before] != slot, positions[before] != position - 1)
                with T.If(begins), T.Then():
                    for tap in range(taps - 1):
                        v.put1(past, [tap], v.splat(0.0))
                        there = T.Bind(position - (taps - 1 - tap))
                        with T.If(there >= 0), T.Then():
                            v.put1(past, [tap], cached(there, slot))
                x = v.some(buf["x"], [m, first], count)
                total = T.Bind(bias + x * weights[taps - 1])
                for tap in range(taps - 1):
                    total = T.Bind(total + past[tap] * weights[tap])
                for tap in range(taps - 2):
                    v.put1(past, [tap], past[tap + 1])
                if taps > 1:
                    v.put1(past, [taps - 2], x)
                page = T.Bind(buf["page_table"][slot, position // job.page_size])
                v.put_some(buf["cache"], [page, 0, position % job.page_size, first], x, count)
                if job.activation is not None:
                    total = ACTIVATIONS[job.activation](total)
                v.put_some(buf["out"], [m, first], total, count)


def _strided(buf: Expr, first: Expr, stride: int, count: int) -> Expr:
    """Sixteen lanes, the first `count` from elements `stride` apart; the others are 0."""
    filled = v.local((v.LANES,), "float32")
    for i in range(v.LANES):
        v.put1(filled, [i], buf[first + i * stride] if i < count else v.f32(0.0))
    return v.lanes(filled, [0])
