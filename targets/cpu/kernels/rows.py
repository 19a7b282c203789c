"""The operations before a matmul: gather and normalize rows of x, quantize them to 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.jobs import Linear
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.dot import LARGEST, DotSums

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


def quantise_row(
    job: Linear, dot: DotSums, corrected: bool, ins: dict[str, Expr], m: Expr, xq: Expr, xs: Expr
) -> None:
    """Quantize row m of x' to integers of 16 bits, xq[m / rows, …], in the words that `dot` multiplies.

    Each group has a scale and a sum, xs[m / rows, group, 2, m % rows]; if `corrected`, a third number
    holds the bits of the sum of the group's integers.

    16 bits instead of the usual 8 keep the error (2^-16 of a group's largest value) below that of float32
    sums over the row, so that greedy text equals that of float32 on the dequantized weights. linear_quant
    states the cost.
    """
    x, row = ins["x"], source_row(job, ins.get("logit_rows"), m)
    rms = norm_scale(x, row, job.matrix.k, job.norm) if job.norm is not None else None

    def value_at(i: Expr) -> Expr:
        value = v.lanes(x, [row, i])
        return value if rms is None else T.Bind(value * v.splat(rms) * v.lanes(ins["norm"], [i]))

    quantise(dot, corrected, value_at, m, xq, xs)


def quantise(
    dot: DotSums, corrected: bool, value_at: Callable[[Expr], Expr], m: Expr, xq: Expr, xs: Expr
) -> None:
    """Quantize a row of inputs as row m; see quantise_row. `value_at` gives sixteen values from one on."""
    matrix, tile = dot.matrix, dot.rows
    group = matrix.group
    t, r = (m, v.i32(0)) if tile == 1 else (T.Bind(m // tile), T.Bind(m % tile))
    with T.serial(0, matrix.k // group) as g:
        regs = [value_at(g * group + i) for i in range(0, group, v.LANES)]
        total, largest = regs[0], tirx.abs(regs[0])
        for value in regs[1:]:
            total, largest = T.Bind(total + value), T.Bind(tirx.max(largest, tirx.abs(value)))
        amax = v.hmax(largest)
        inverse = T.Bind(tirx.Select(amax > v.f32(0.0), v.f32(LARGEST) / amax, v.f32(0.0)))
        v.put1(xs, [t, g, 0, r], amax * v.f32(1.0 / LARGEST))
        v.put1(xs, [t, g, 1, r], v.hsum(total))
        integers = [T.Bind(v.cast(tirx.nearbyint(value * v.splat(inverse)), v.I32X16)) for value in regs]
        if corrected:
            whole = functools.reduce(lambda a, b: T.Bind(a + b), integers)
            v.put1(xs, [t, g, 2, r], v.bits(v.hreduce(whole, lambda a, b: a + b, "int32"), "float32"))
        for i, value in enumerate(integers):
            words, first = dot.inputs(value), (g * group + i * v.LANES) // 2 * tile
            if tile == 1:
                v.put(xq, [t, first], words, 8)
                continue
            for j in range(8):
                v.put1(xq, [t, first + dot.place(j, r)], tirx.Shuffle([words], [j]))
