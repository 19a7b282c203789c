"""Log probabilities of the sampled token and of the 20 best, from the raw logits: one workgroup for
each row.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: SIM102
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Logprobs
from nearfar.targets.gpu.kernels.common import LOWEST, ceil_div, finish
from nearfar.targets.gpu.kernels.script.text import prim_func

THREADS = 256
TOP = 20
PARAMS = ("logits", "sampled", "logprob", "top_ids", "top_logprobs")


def logprobs(job: Logprobs) -> Staged:
    """The launch of a Logprobs job."""
    return Staged((Stage(_logprobs(job.rows, job.vocab), PARAMS),))


def _logprobs(rows: int, vocab: int) -> tirx.PrimFunc:
    """The kernel that finds, 20 times, the best token after the last one (value down, then index up); the
    first is the maximum.
    """
    turns = ceil_div(vocab, THREADS)

    @prim_func
    def kernel(
        logits: T.Buffer((MAX_ROWS, vocab), "float32"),
        sampled: T.Buffer((MAX_ROWS,), "int32"),
        logprob: T.Buffer((MAX_ROWS,), "float32"),
        top_ids: T.Buffer((MAX_ROWS, TOP), "int32"),
        top_logprobs: T.Buffer((MAX_ROWS, TOP), "float32"),
    ):
        for bx in T.thread_binding(rows, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                best = T.alloc_shared((THREADS,), "float32")
                best_id = T.alloc_shared((THREADS,), "int32")
                top = T.alloc_shared((TOP + 1,), "float32")
                top_id = T.alloc_shared((TOP + 1,), "int32")
                value = T.alloc_local((3,), "float32")
                at = T.alloc_local((3,), "int32")
                value[2] = T.float32(-LOWEST)
                at[2] = -1
                for rank in T.serial(TOP):
                    value[0] = T.float32(LOWEST)
                    at[0] = vocab
                    for t in T.serial(turns):
                        at[1] = t * THREADS + tx
                        if at[1] < vocab:
                            value[1] = logits[bx, at[1]]
                            if value[1] > value[0]:
                                if value[1] < value[2] or (value[1] == value[2] and at[1] > at[2]):
                                    value[0] = value[1]
                                    at[0] = at[1]
                    best[tx] = value[0]
                    best_id[tx] = at[0]
                    T.tvm_storage_sync("shared")
                    if tx == 0:
                        for t in T.serial(THREADS):
                            value[1] = best[t]  # TVM takes no workgroup memory in a condition
                            at[1] = best_id[t]
                            if value[1] > value[0] or (value[1] == value[0] and at[1] < at[0]):
                                value[0] = value[1]
                                at[0] = at[1]
                        top[rank] = value[0]
                        top_id[rank] = at[0]
                    T.tvm_storage_sync("shared")
                    value[2] = top[rank]
                    at[2] = top_id[rank]
                value[0] = T.float32(0)
                for t in T.serial(turns):
                    if t * THREADS + tx < vocab:
                        value[0] = value[0] + T.exp(logits[bx, t * THREADS + tx] - top[0])
                best[tx] = value[0]
                T.tvm_storage_sync("shared")
                if tx == 0:
                    value[0] = T.float32(0)
                    for t in T.serial(THREADS):
                        value[0] = value[0] + best[t]
                    value[1] = top[0] + T.log(value[0])
                    top[TOP] = value[1]
                    logprob[bx] = logits[bx, T.max(T.min(sampled[bx], vocab - 1), 0)] - value[1]
                T.tvm_storage_sync("shared")
                if tx < TOP:
                    top_ids[bx, tx] = top_id[tx]
                    top_logprobs[bx, tx] = top[tx] - top[TOP]

    return finish(kernel, "logprobs")
