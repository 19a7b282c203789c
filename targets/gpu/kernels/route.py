"""Chooses the experts of each row, with a thread for each row.

The thread keeps no scores: it computes them again for each expert that it chooses, so that the number of
experts is not bounded by its registers.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Route
from nearfar.targets.gpu.kernels.common import HIGHEST, LOWEST, ceil_div, select
from nearfar.targets.gpu.kernels.script.text import prim_func

THREADS = 32


def route(job: Route) -> Staged:
    """The launch of a Route job."""
    m, experts, top = job.m, job.experts, job.top
    names = [*job.inputs(), "out"]
    softmax, normalizes = job.score == "softmax", job.normalize is not None
    epsilon = job.normalize or 0.0

    def score(value, highest, total):
        if softmax:
            return T.exp(value - highest) / total
        return T.float32(1) / (T.float32(1) + T.exp(-value))

    def key(value, bias, e):
        return value + bias[e] if job.bias else value

    def weight(value, factors, e):
        value = value * T.float32(job.scale)
        return value * factors[e] if job.factors else value

    @prim_func
    def kernel(
        x: T.Buffer((m, experts), "float32"),
        positions: T.Buffer((MAX_STEP,), "int32"),
        bias: T.Buffer((experts,), "float32"),
        factors: T.Buffer((experts,), "float32"),
        out: T.Buffer((m, 2 * top), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(m, THREADS), thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                found = T.alloc_local(
                    (8,), "float32"
                )  # highest, total, score, key, best, best key, last, sum
                at = T.alloc_local((3,), "int32")  # row, best, last
                at[0] = bx * THREADS + tx
                if at[0] < m:
                    if positions[at[0]] < 0:
                        for j in T.serial(top):
                            out[at[0], j] = T.float32(-1)
                            out[at[0], j + top] = T.float32(0)
                    else:
                        found[0] = T.float32(LOWEST)
                        found[1] = T.float32(0)
                        if softmax:
                            for e in T.serial(experts):
                                found[0] = T.max(found[0], x[at[0], e])
                            for e in T.serial(experts):
                                found[1] = found[1] + T.exp(x[at[0], e] - found[0])
                        found[6] = T.float32(HIGHEST)
                        found[7] = T.float32(0)
                        at[2] = -1
                        for j in T.serial(top):
                            found[4] = T.float32(0)
                            found[5] = T.float32(LOWEST)
                            at[1] = 0
                            for e in T.serial(experts):
                                found[2] = score(x[at[0], e], found[0], found[1])
                                found[3] = key(found[2], bias, e)
                                behind: T.let = found[3] < found[6] or (found[3] == found[6] and e > at[2])
                                if found[3] > found[5] and behind:
                                    found[4] = found[2]
                                    found[5] = found[3]
                                    at[1] = e
                            out[at[0], j] = T.Cast("float32", at[1])
                            out[at[0], j + top] = weight(found[4], factors, at[1])
                            found[6] = found[5]
                            at[2] = at[1]
                            found[7] = found[7] + found[4]
                        if normalizes:
                            for j in T.serial(top):
                                out[at[0], j + top] = out[at[0], j + top] / (found[7] + T.float32(epsilon))

    return Staged((Stage(select(kernel, names, "route"), tuple(names)),))
