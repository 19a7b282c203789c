"""The gated delta rule as a recurrence (recurrence.py): the launch of decays and rates."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.kernels.contract import SCRATCH, Stage, Staged
from nearfar.kernels.jobs import Delta
from nearfar.targets.gpu.classes import Tuning
from nearfar.targets.gpu.kernels.activations import sigmoid_product, softplus
from nearfar.targets.gpu.kernels.common import ceil_div, finish
from nearfar.targets.gpu.kernels.recurrence import THREADS, RowColumns, recurrence
from nearfar.targets.gpu.kernels.script.text import prim_func


def delta(job: Delta, tuning: Tuning) -> Staged:
    """The launches of a Delta job."""
    keys = job.key_heads * job.key_dim
    rows = RowColumns(keys, 0, 2 * keys, job.key_head, job.key_dim, job.value_dim)
    return recurrence(job, rows, Stage(_gates(job), ("gates", "a_log", "dt_bias", f"{SCRATCH}0")), tuning)


def _gates(job: Delta):
    """The kernel with a thread for each row and head: out = [decay | rate]."""
    m, heads = job.m, job.heads

    @prim_func
    def kernel(
        gates: T.Buffer((m, 2 * heads), "float32"),
        a_log: T.Buffer((heads,), "float32"),
        dt_bias: T.Buffer((heads,), "float32"),
        out: T.Buffer((m, 2 * heads), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(m * heads, THREADS), thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                at = T.alloc_local((2,), "int32")  # row, head
                value = T.alloc_local((1,), "float32")
                at[0] = (bx * THREADS + tx) // heads
                at[1] = (bx * THREADS + tx) % heads
                if at[0] < m:
                    value[0] = gates[at[0], at[1]] + dt_bias[at[1]]
                    out[at[0], at[1]] = T.exp(-T.exp(a_log[at[1]]) * softplus(value[0]))
                    value[0] = gates[at[0], heads + at[1]]
                    out[at[0], heads + at[1]] = sigmoid_product(T.float32(1), value[0])

    return finish(kernel, "delta_gates")
