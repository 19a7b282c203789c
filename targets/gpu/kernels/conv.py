"""Causal convolution of each column by itself, with a thread for each column of a row.

A thread takes what its row sees from the rows before it in the step, or from the cache. What a step writes to
the cache no thread of the step reads there.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Conv
from nearfar.targets.gpu.kernels.activations import activated
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.script.text import prim_func

THREADS = 64


def conv(job: Conv) -> Staged:
    """The launch of a Conv job."""
    m, width, taps, page = job.m, job.width, job.taps, job.page_size
    names = [*job.inputs(), "out"]

    @prim_func
    def kernel(
        x: T.Buffer((m, width), "float32"),
        weight: T.Buffer((width * taps,), "float32"),
        bias: T.Buffer((width,), "float32"),
        cache_h: T.handle,
        positions: T.Buffer((MAX_STEP,), "int32"),
        slots: T.Buffer((MAX_STEP,), "int32"),
        page_table: T.Buffer((job.slots, job.pages_per_slot), "int32"),
        out: T.Buffer((m, width), "float32"),
    ):
        pages = T.int32()
        cache = T.match_buffer(cache_h, (pages, 1, page, width), "float32")
        for bx in T.thread_binding(ceil_div(width, THREADS), thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    at = T.alloc_local((6,), "int32")  # column, position, slot, seen, its row, page
                    value = T.alloc_local((2,), "float32")  # sum, what a tap sees
                    at[0] = bx * THREADS + tx
                    if at[0] < width:
                        at[1] = positions[by]
                        if at[1] < 0:
                            out[by, at[0]] = T.float32(0)
                        else:
                            at[2] = slots[by]
                            value[1] = x[by, at[0]]
                            at[5] = page_table[at[2], at[1] // page]
                            cache[at[5], 0, at[1] % page, at[0]] = value[1]
                            value[0] = value[1] * weight[at[0] * taps + taps - 1]
                            if job.bias:
                                value[0] = value[0] + bias[at[0]]
                            for back in T.serial(taps - 1):
                                at[3] = at[1] - back - 1
                                if at[3] >= 0:
                                    at[4] = T.max(by - back - 1, 0)
                                    if by > back and slots[at[4]] == at[2] and positions[at[4]] == at[3]:
                                        value[1] = x[at[4], at[0]]
                                    else:
                                        at[5] = page_table[at[2], at[3] // page]
                                        value[1] = cache[at[5], 0, at[3] % page, at[0]]
                                    value[0] = value[0] + value[1] * weight[at[0] * taps + taps - 2 - back]
                            if job.activation is not None:
                                value[0] = activated(job.activation, value[0])
                            out[by, at[0]] = value[0]

    return Staged((Stage(select(kernel, names, "conv"), tuple(names)),))
