"""The operations before a matmul: gather and normalize rows of x, round them to 16 bits."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.jobs import Linear
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.rounded import ValueAt

Expr = Any


def x_args(job: Linear) -> list[tuple[str, tuple[int, ...], str]]:
    """The parameters that describe the input rows, in the order of the contract."""
    args: list[tuple[str, tuple[int, ...], str]] = [
        ("x", (job.x_rows if job.rows else job.m, job.matrix.k), job.x_dtype)
    ]
    if job.rows:
        args.append(("logit_rows", (MAX_ROWS,), "int32"))
    if job.norm is not None:
        args.append(("norm", (job.matrix.k,), "float32"))
    return args


def norm_scale(x: Expr, row: Expr, k: int, eps: float, first: Expr = 0) -> Expr:
    """1 / rms of x[row, first … first+k]."""
    total = v.registers(1)
    v.put1(total, [0], v.splat(0.0))
    with T.serial(0, k // v.LANES) as i:
        part = v.lanes(x, [row, i * v.LANES + first])
        v.put1(total, [0], total[0] + part * part)
    tail = v.scalar("float32")
    v.put1(tail, [0], v.hsum(total[0]))
    for i in range(k - k % v.LANES, k):
        v.put1(tail, [0], tail[0] + x[row, first + i] * x[row, first + i])
    return T.Bind(v.f32(1.0) / tirx.sqrt(tail[0] * v.f32(1.0 / k) + v.f32(eps)))


def source_row(job: Linear, logit_rows: Expr, m: Expr) -> Expr:
    """The row of x that becomes row m of the matmul."""
    return T.Bind(logit_rows[m]) if job.rows else m


def values_of(job: Linear, ins: dict[str, Expr], m: Expr) -> ValueAt:
    """Gives sixteen values of row m of x' from one on."""
    x, row = ins["x"], source_row(job, ins.get("logit_rows"), m)
    rms = norm_scale(x, row, job.matrix.k, job.norm) if job.norm is not None else None

    def value_at(i: Expr) -> Expr:
        value = v.lanes(x, [row, i])
        return value if rms is None else T.Bind(value * v.splat(rms) * v.lanes(ins["norm"], [i]))

    return value_at
