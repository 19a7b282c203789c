"""The state space of Mamba-2 as a recurrence (recurrence.py): keys are B, queries are C, rates are dt. The
first launch computes dt and the decays.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.kernels.contract import SCRATCH, Stage, Staged
from nearfar.kernels.jobs import Ssm
from nearfar.targets.gpu.classes import Tuning
from nearfar.targets.gpu.kernels.activations import softplus
from nearfar.targets.gpu.kernels.common import ceil_div, finish
from nearfar.targets.gpu.kernels.recurrence import THREADS, RowColumns, recurrence
from nearfar.targets.gpu.kernels.script.text import prim_func


def ssm(job: Ssm, tuning: Tuning) -> Staged:
    """The launches of an Ssm job."""
    inner, of_groups = job.heads * job.head_dim, job.groups * job.depth
    each = job.heads // job.groups
    rows = RowColumns(inner, inner + of_groups, 0, lambda head: head // each, job.depth, job.head_dim)
    return recurrence(job, rows, Stage(_gates(job), ("dt", "terms", f"{SCRATCH}0")), tuning)


def _gates(job: Ssm):
    """The kernel with a thread for each row and head: out = [decay | dt that the state sees]."""
    m, heads = job.m, job.heads

    @prim_func
    def kernel(
        dt: T.Buffer((m, heads), "float32"),
        terms: T.Buffer((3 * heads,), "float32"),
        out: T.Buffer((m, 2 * heads), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(m * heads, THREADS), thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                at = T.alloc_local((2,), "int32")  # row, head
                value = T.alloc_local((1,), "float32")
                at[0] = (bx * THREADS + tx) // heads
                at[1] = (bx * THREADS + tx) % heads
                if at[0] < m:
                    value[0] = dt[at[0], at[1]] + terms[heads + at[1]]
                    value[0] = softplus(value[0])
                    if job.least > 0:
                        value[0] = T.max(value[0], T.float32(job.least))
                    if job.most is not None:
                        value[0] = T.min(value[0], T.float32(job.most))
                    out[at[0], at[1]] = T.exp(-T.exp(terms[at[1]]) * value[0])
                    out[at[0], heads + at[1]] = value[0]

    return finish(kernel, "ssm_gates")
