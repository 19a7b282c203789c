"""The weighted sums of the outputs of each row's experts."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.kernels.jobs import Experts
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.experts.column import THREADS, Column
from nearfar.targets.gpu.kernels.script.text import prim_func


def fused(job: Experts):
    """Column `column` of a row: the products by the second matrices of its experts, and their sum, in the
    order of the experts.
    """
    m, top, inner, n = job.m, job.top, job.inner, job.n
    column = Column.of(job.down)
    units = column.units
    codes_shape, dtype, scales_shape = column.shapes
    names = ["x", "route", *["w0", "w1"][: 1 + job.down.quantized], *["bias"] * job.down_bias, "out"]

    @prim_func
    def kernel(
        x: T.Buffer((m * top, inner), "float32"),
        route: T.Buffer((m, 2 * top), "float32"),
        w0: T.Buffer(codes_shape, dtype),
        w1: T.Buffer(scales_shape, "uint32"),
        bias: T.Buffer((job.down.n,), "float32"),
        out: T.Buffer((m, n), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(n, THREADS), thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    at = T.alloc_local((4,), "int32")  # column, expert, its column, unit
                    word = T.alloc_local((units.words,), dtype)
                    acc = T.alloc_local((2,), "float32")  # sum over experts, over inputs
                    row = T.alloc_local((1,), "int32")
                    scale = T.alloc_local((3,), "float32")  # scale, bias, a weight
                    at[0] = bx * THREADS + tx
                    if at[0] < n:
                        acc[0] = T.float32(0)
                        for i in T.serial(top):
                            at[1] = T.Cast("int32", route[by, i])
                            if at[1] >= 0:
                                acc[1] = T.float32(0)
                                at[2] = at[1] * n + at[0]
                                row[0] = by * top + i
                                column.add(acc, 1, scale, word, at, x, row, w0, w1)
                                if job.down_bias:
                                    acc[1] = acc[1] + bias[at[2]]
                                acc[0] = acc[0] + acc[1] * route[by, i + top]
                        out[by, at[0]] = acc[0]

    return select(kernel, names, "experts_sums")


def sums(job: Experts):
    """Column `column` of a row: the sum of the outputs of its pairs times their weights, in the order of the
    experts.
    """
    m, top, n = job.m, job.top, job.n

    @prim_func
    def kernel(
        x: T.Buffer((m * top, n), "float32"),
        route: T.Buffer((m, 2 * top), "float32"),
        out: T.Buffer((m, n), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(n, THREADS), thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    at = T.alloc_local((1,), "int32")
                    acc = T.alloc_local((1,), "float32")
                    at[0] = bx * THREADS + tx
                    if at[0] < n:
                        acc[0] = T.float32(0)
                        for i in T.serial(top):
                            if route[by, i] >= T.float32(0):
                                acc[0] = acc[0] + x[by * top + i, at[0]] * route[by, i + top]
                        out[by, at[0]] = acc[0]

    return select(kernel, ["x", "route", "out"], "experts_sums")
