"""RMS norm of rows, for norms that are not fused into a matmul."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Norm
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.extents import opened
from nearfar.targets.cpu.kernels.rows import norm_scale
from nearfar.targets.cpu.units import Unit

Expr = Any


def norm(job: Norm, unit: Unit) -> Staged:
    """The launch of a Norm job."""
    job, width = opened(job), job.k // job.groups
    shapes = {"weight": (job.k if job.each else width,)}
    args = [(name, shapes.get(name, (job.m, job.k)), "float32") for name in (*job.inputs(), "out")]

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        with v.rows(job.m) as m, T.serial(0, job.groups) as g:
            first = T.Bind(g * width)
            scale = norm_scale(buf["x"], m, width, job.eps, first)

            def some(i: Expr, count: int) -> None:
                value = T.Bind(v.some(buf["x"], [m, first + i], count) * v.splat(scale))
                if job.weight:
                    at = first + i if job.each else i
                    value = T.Bind(value * v.some(buf["weight"], [at], count))
                if job.residual:
                    value = T.Bind(value + v.some(buf["residual"], [m, first + i], count))
                v.put_some(buf["out"], [m, first + i], value, count)

            with T.serial(0, width // v.LANES) as i:
                some(i * v.LANES, v.LANES)
            if width % v.LANES:
                some(v.i32(width - width % v.LANES), width % v.LANES)

    return Staged((Stage(v.prim_func("norm", args, body), tuple(name for name, *_ in args)),))
