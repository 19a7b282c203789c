"""activation(gate)·up of a matmul whose gate and up columns come from different launches."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.kernels.common import ceil_div, select, stored
from nearfar.targets.gpu.kernels.linear.epilogue import finish
from nearfar.targets.gpu.kernels.script.text import prim_func

THREADS = 64


def glu(job: Linear) -> tirx.PrimFunc:
    """The kernel with a thread for each column of a row: the operations after the products, from both in
    float32 [m, 2n].
    """
    m, n = job.m, job.columns
    total = m * n

    @prim_func
    def kernel(
        both: T.Buffer((m, 2 * n), "float32"),
        residual: T.Buffer((m, n), job.out_dtype),
        out: T.Buffer((m, n), job.out_dtype),
    ):
        for bx in T.thread_binding(ceil_div(total, THREADS), thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                value = T.alloc_local((1,), "float32")
                at = T.alloc_local((2,), "int32")
                at[0] = (bx * THREADS + tx) // n
                at[1] = (bx * THREADS + tx) % n
                if at[0] < m:
                    value[0] = both[at[0], at[1]]
                    finish(job, value, 0, both[at[0], n + at[1]], residual[at[0], at[1]])
                    out[at[0], at[1]] = stored(value[0], job.out_dtype)

    return select(kernel, ["both", *["residual"] * job.residual, "out"], "glu")
