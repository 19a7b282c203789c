"""Argmax of the logits in two launches: a workgroup for each range of the vocabulary, then one over the
ranges.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: B007
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sampler import COLUMNS
from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Greedy
from nearfar.targets.gpu.kernels.common import HIGHEST, LOWEST, ceil_div, finish
from nearfar.targets.gpu.kernels.script.text import prim_func

THREADS = 64
RANGE = 2048  # tokens of a workgroup; the largest vocabulary has 75 workgroups
SLOT, FEED = 0, 5  # columns of sample_i32


def greedy(job: Greedy) -> Staged:
    """The launches of a Greedy job."""
    rows, vocab = job.rows, job.vocab
    ranges = ceil_div(vocab, RANGE)
    stages = (
        Stage(_ranges(rows, vocab, ranges), ("logits", "scratch:0", "scratch:1")),
        Stage(_best(rows, ranges), ("scratch:0", "scratch:1", "sample_i32", "sampled", "tokens")),
    )
    return Staged(stages, (((rows, ranges), "float32"), ((rows, ranges), "int32")))


def _ranges(rows: int, vocab: int, ranges: int) -> tirx.PrimFunc:
    """The kernel that finds the best value and lowest index of a range. `>` keeps the first of equals;
    infinities and NaN are skipped.
    """

    @prim_func
    def kernel(
        logits: T.Buffer((MAX_ROWS, vocab), "float32"),
        values: T.Buffer((rows, ranges), "float32"),
        ids: T.Buffer((rows, ranges), "int32"),
    ):
        for bx in T.thread_binding(ranges, thread="blockIdx.x"):
            for by in T.thread_binding(rows, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    best = T.alloc_shared((THREADS,), "float32")
                    best_id = T.alloc_shared((THREADS,), "int32")
                    value = T.alloc_local((2,), "float32")
                    at = T.alloc_local((2,), "int32")
                    value[0] = T.float32(LOWEST)
                    at[0] = bx * RANGE + tx
                    for t in T.serial(RANGE // THREADS):
                        at[1] = bx * RANGE + t * THREADS + tx
                        if at[1] < vocab:
                            value[1] = logits[by, at[1]]
                            if value[1] > value[0] and value[1] <= T.float32(HIGHEST):
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
                        values[by, bx] = value[0]
                        ids[by, bx] = at[0]

    return finish(kernel, "greedy_ranges")


def _best(rows: int, ranges: int) -> tirx.PrimFunc:
    """The kernel with a thread for each row, over the ranges."""

    @prim_func
    def kernel(
        values: T.Buffer((rows, ranges), "float32"),
        ids: T.Buffer((rows, ranges), "int32"),
        sample_i32: T.Buffer((MAX_ROWS, COLUMNS), "int32"),
        sampled: T.Buffer((MAX_ROWS,), "int32"),
        tokens: T.Buffer((MAX_STEP,), "int32"),
    ):
        for bx in T.thread_binding(1, thread="blockIdx.x"):
            for tx in T.thread_binding(rows, thread="threadIdx.x"):
                value = T.alloc_local((1,), "float32")
                at = T.alloc_local((2,), "int32")
                value[0] = values[tx, 0]
                at[0] = ids[tx, 0]
                for t in T.serial(ranges):
                    if values[tx, t] > value[0]:
                        value[0] = values[tx, t]
                        at[0] = ids[tx, t]
                if value[0] <= T.float32(LOWEST):
                    at[0] = -1  # no logit is finite
                if sample_i32[tx, SLOT] >= 0:
                    sampled[tx] = at[0]
                    at[1] = sample_i32[tx, FEED]
                    if at[1] >= 0:
                        tokens[T.min(at[1], 255)] = T.max(at[0], 0)

    return finish(kernel, "greedy_best")
