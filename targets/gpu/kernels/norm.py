"""RMS norm of rows, or of equal parts of rows, as a kernel of its own, with a workgroup for each part."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Norm
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.script.text import prim_func


def threads_for(width: int) -> int:
    """Threads of a workgroup that adds up `width` squares; at a barrier each costs SwiftShader time."""
    return 128 if width > 512 else 32


def norm(job: Norm) -> Staged:
    """The launch of a Norm job."""
    m, k, width = job.m, job.k, job.k // job.groups
    threads = threads_for(width)
    turns, ragged = ceil_div(width, threads), width % threads != 0
    weights = k if job.each else width
    names = [*job.inputs(), "out"]

    def normed(value, rstd, weight, residual, row, start, at):
        value = value * rstd
        value = value * weight[start + at if job.each else at] if job.weight else value
        return value + residual[row, start + at] if job.residual else value

    @prim_func
    def kernel(
        x: T.Buffer((m, k), "float32"),
        weight: T.Buffer((weights,), "float32"),
        residual: T.Buffer((m, k), "float32"),
        out: T.Buffer((m, k), "float32"),
    ):
        for bx in T.thread_binding(job.groups, thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(threads, thread="threadIdx.x"):
                    squares = T.alloc_shared((threads,), "float32")
                    value = T.alloc_local((2,), "float32")
                    value[1] = T.float32(0)
                    for t in T.serial(turns):
                        if not ragged or t * threads + tx < width:
                            value[0] = x[by, bx * width + t * threads + tx]
                            value[1] = value[1] + value[0] * value[0]
                    squares[tx] = value[1]
                    T.tvm_storage_sync("shared")
                    value[1] = T.float32(0)
                    for t in T.serial(threads):
                        value[1] = value[1] + squares[t]
                    value[1] = T.rsqrt(value[1] * T.float32(1.0 / width) + T.float32(job.eps))
                    for t in T.serial(turns):
                        if not ragged or t * threads + tx < width:
                            value[0] = x[by, bx * width + t * threads + tx]
                            out[by, bx * width + t * threads + tx] = normed(
                                value[0], value[1], weight, residual, by, bx * width, t * threads + tx
                            )

    return Staged((Stage(select(kernel, names, "norm"), tuple(names)),))
