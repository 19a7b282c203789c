"""The operations after a matmul: bias, gate, softcap, residual, store."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.jobs import Linear
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.activations import ACTIVATIONS, softcap

Expr = Any
Args = list[tuple[str, tuple[int, ...], str]]


def out_args(job: Linear) -> Args:
    """The parameters after the weights, in the order of the contract."""
    args: Args = []
    if job.bias:
        args.append(("bias", (job.of or job.matrix.n,), "float32"))
    if job.residual:
        args.append(("residual", (job.m, job.width), job.out_dtype))
    args.append(("out", *job.out))
    return args


def params(args: Args) -> tuple[str, ...]:
    """The names of a stage's arguments."""
    return tuple(name for name, *_ in args)


def finish_tile(
    job: Linear,
    buf: dict[str, Expr],
    block: Expr,
    row: Expr,
    tile: int,
    acc: Expr,
    up: Expr | None,
) -> None:
    """Store rows row … row+tile of a block's outputs from the sums `acc` [tile, ROWS].

    `up`: the second factor of a gate.
    """
    for r in range(tile):
        column = block * v.ROWS
        if job.first:
            column = T.Bind(column + job.first)
        if job.columns % v.ROWS:
            _finish_lanes(job, buf, column, row + r, v.lanes(acc, [r, 0]))
        else:
            _finish_vector(
                job, buf, column, row + r, v.lanes(acc, [r, 0]), None if up is None else v.lanes(up, [r, 0])
            )


def bounded(job: Linear, value: Expr, up: Expr | None) -> Expr:
    """A job's gate and softcap applied to sixteen lanes."""
    if job.gate is not None:
        value = T.Bind(ACTIVATIONS[job.gate](value) * up)
    return value if job.softcap is None else softcap(value, job.softcap)


def _finish_vector(
    job: Linear, buf: dict[str, Expr], column: Expr, row: Expr, value: Expr, up: Expr | None
) -> None:
    if job.bias:
        value = T.Bind(value + v.lanes(buf["bias"], [column]))
        if up is not None:
            up = T.Bind(up + v.lanes(buf["bias"], [column + job.columns]))
    value = bounded(job, value, up)
    if job.residual:
        value = T.Bind(value + v.cast(v.lanes(buf["residual"], [row, column]), v.F32X16))
    v.put(buf["out"], [row, column], v.cast(value, f"{job.out_dtype}x{v.LANES}"))


def _finish_lanes(job: Linear, buf: dict[str, Expr], column: Expr, row: Expr, value: Expr) -> None:
    """Store a row of the last block if it is not full, lane by lane, without writing past the end. Gates are
    excluded (linear.py).
    """
    lanes = v.local((1, v.LANES), "float32")
    v.put(lanes, [0, 0], value)
    if job.bias:
        with T.serial(0, v.LANES) as i, T.If(column + i < job.first + job.columns), T.Then():
            v.put1(lanes, [0, i], lanes[0, i] + buf["bias"][column + i])
    if job.softcap is not None:
        v.put(lanes, [0, 0], softcap(v.lanes(lanes, [0, 0]), job.softcap))
    with T.serial(0, v.LANES) as i, T.If(column + i < job.first + job.columns), T.Then():
        one: Expr = lanes[0, i]
        if job.residual:
            one = T.Bind(one + tirx.Cast("float32", buf["residual"][row, column + i]))
        v.put1(buf["out"], [row, column + i], tirx.Cast(job.out_dtype, one))
