"""What follows a matmul: bias, gate, residual, store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.jobs import Linear

Expr = Any
Args = list[tuple[str, tuple[int, ...], str]]


def out_columns(job: Linear) -> int:
    """Columns of the output."""
    return job.matrix.n // 2 if job.gated else job.matrix.n


def out_args(job: Linear) -> Args:
    """The parameters after the weights, in the order of the contract."""
    args: Args = []
    if job.bias:
        args.append(("bias", (job.matrix.n,), "float32"))
    if job.residual:
        args.append(("residual", (job.m, out_columns(job)), job.out_dtype))
    args.append(("out", (16 if job.rows else job.m, out_columns(job)), job.out_dtype))
    return args


def params(args: Args) -> tuple[str, ...]:
    """The names by which a stage asks for its arguments."""
    return tuple(name for name, *_ in args)


def finish_tile(
    job: Linear, buf: dict[str, Expr], block: Expr, row: Expr, tile: int, halves: Sequence[Expr], acc: Expr, up: Expr | None
) -> None:
    """Store rows row … row+tile of a block's outputs from the sums `acc` (and `up`, the second factor of a gated job)."""
    finish = _finish_lanes if out_columns(job) % v.ROWS else _finish_vector
    for r in range(tile):
        for h, half in enumerate(halves):
            i = r * len(halves) + h
            finish(job, buf, block * v.ROWS + half * v.LANES, row + r, acc[i], None if up is None else up[i])


def _finish_vector(job: Linear, buf: dict[str, Expr], column: Expr, row: Expr, value: Expr, up: Expr | None) -> None:
    if job.bias:
        value = T.Bind(value + v.lanes(buf["bias"], [column]))
    if up is not None:
        if job.bias:
            up = T.Bind(up + v.lanes(buf["bias"], [column + out_columns(job)]))
        value = T.Bind(v.silu(value) * up)
    if job.residual:
        value = T.Bind(value + v.cast(v.lanes(buf["residual"], [row, column]), v.F32X8))
    v.put(buf["out"], [row, column], v.cast(value, f"{job.out_dtype}x{v.LANES}"))


def _finish_lanes(job: Linear, buf: dict[str, Expr], column: Expr, row: Expr, value: Expr, up: Expr | None) -> None:
    """As above where the last block is not full: lane by lane, past the end nothing."""
    n = out_columns(job)
    lanes = v.local((2, v.LANES), "float32")
    v.put(lanes, [0, 0], value)
    if up is not None:
        v.put(lanes, [1, 0], up)
    with T.serial(0, v.LANES) as i, T.If(column + i < n), T.Then():
        one: Expr = lanes[0, i]
        if job.bias:
            one = T.Bind(one + buf["bias"][column + i])
        if up is not None:
            two: Expr = lanes[1, i]
            if job.bias:
                two = T.Bind(two + buf["bias"][column + i + n])
            one = T.Bind(one / (v.f32(1.0) + tirx.exp(v.f32(0.0) - one)) * two)
        if job.residual:
            one = T.Bind(one + tirx.Cast("float32", buf["residual"][row, column + i]))
        v.put1(buf["out"], [row, column + i], tirx.Cast(job.out_dtype, one))
