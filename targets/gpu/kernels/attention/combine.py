"""Joins attention's parts (jobs.Split), in a launch of its own or at the beginning of a matmul.

A part's weight is the exponential of the logarithm behind its values. The number of a row's parts is computed
from its position; the others are not read.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed; what `gather` writes are statements of the kernel being parsed.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.jobs import Attend, Linear, Split
from nearfar.targets.gpu.kernels.attention.heads import HeadVectors
from nearfar.targets.gpu.kernels.common import LOWEST, ceil_div, f32, select, stored
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, clear, f32x4, joined, of_numbers, spread
from nearfar.targets.gpu.kernels.script.vectors import at as place_of

AHEAD = 16  # parts whose values a thread of a matmul loads at a time


def span_of(split: Split, position):
    """The number of blocks in a part, at least one; `position`: the row's."""
    return T.max((_blocks(split, position) + (split.count - 1)) // split.count, 1)


def used(split: Split, position):
    """The number of parts of a row; 0 for padding."""
    span = span_of(split, position)
    return (_blocks(split, position) + span - 1) // span


def _blocks(split: Split, position):
    seen = position + 1 if split.window is None else T.min(position + 1, split.window)
    return (seen + (split.block - 1)) // split.block


def combine(job: Attend, split: Split, threads: int, counted: bool = False) -> tirx.PrimFunc:
    """The kernel of a launch of its own: a workgroup for each head and row, with stripes of its threads along
    the parts.

    `counted`: the number of a row's parts is behind the values of the first part, in the third place.
    """
    m, heads, dim, count = job.m, job.heads, job.head_dim, split.count
    head_of = HeadVectors.of(job)
    width, vectors = head_of.width, head_of.count
    stripes, cells = max(threads // vectors, 1), ceil_div(vectors, threads)

    @prim_func
    def kernel(
        partial: T.Buffer((m, heads, count, vectors + Split.TAIL // width), head_of.dtype(job.dtype)),
        positions: T.Buffer((MAX_STEP,), "int32"),
        sinks: T.Buffer((heads,), "float32"),
        out: T.Buffer((m, heads * vectors), head_of.dtype(job.dtype)),
    ):
        for bx in T.thread_binding(heads, thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(threads, thread="threadIdx.x"):
                    told = T.alloc_shared((count,), "float32")
                    pool = T.alloc_shared((stripes * dim,), "float32")
                    acc = T.alloc_local((cells * width,), "float32")
                    made = T.alloc_local((width,), "float32")
                    tmp = T.alloc_local((3,), "float32")  # the maximum, the sum and the weight of a part
                    there: T.let = (
                        T.Cast("int32", tail(head_of, partial, by, bx, 0, 2))
                        if counted
                        else used(split, positions[by])
                    )
                    for t in T.unroll(ceil_div(count, threads)):
                        if t * threads + tx < there:
                            told[t * threads + tx] = logarithm(head_of, partial, by, bx, t * threads + tx)
                    T.tvm_storage_sync("shared")
                    tmp[0] = T.float32(LOWEST)
                    tmp[1] = T.float32(0)
                    if split.sinks:
                        tmp[0] = sinks[bx]
                    for p in T.serial(there):
                        tmp[0] = T.max(tmp[0], told[p])
                    if split.sinks:
                        tmp[1] = T.exp(sinks[bx] - tmp[0])
                    for p in T.serial(there):
                        tmp[1] = tmp[1] + T.exp(told[p] - tmp[0])
                    tmp[1] = T.if_then_else(tmp[1] > T.float32(0), T.float32(1) / tmp[1], T.float32(0))
                    for i in T.unroll(cells * width):
                        acc[i] = T.float32(0)
                    if tx < stripes * vectors:
                        for p in T.serial((there + stripes - 1 - tx // vectors) // stripes):
                            tmp[2] = T.exp(told[p * stripes + tx // vectors] - tmp[0]) * tmp[1]
                            for i in T.unroll(cells):
                                if cells == 1 or i * threads + tx < vectors:
                                    value: T.let = head_of.f32(
                                        partial[
                                            by,
                                            bx,
                                            p * stripes + tx // vectors,
                                            tx % vectors if cells == 1 else i * threads + tx,
                                        ]
                                    )
                                    head_of.add(acc, i * width, value, tmp[2])
                        for i in T.unroll(cells):
                            if cells == 1 or i * threads + tx < vectors:
                                for e in T.unroll(width):  # columns lie apart, against bank conflicts
                                    pool[
                                        tx // vectors * dim
                                        + e * vectors
                                        + (tx % vectors if cells == 1 else i * threads + tx)
                                    ] = acc[i * width + e]
                    T.tvm_storage_sync("shared")
                    for i in T.unroll(cells):
                        if i * threads + tx < vectors:
                            for e in T.unroll(width):
                                made[e] = T.float32(0)
                                for s in T.unroll(stripes):
                                    made[e] = made[e] + pool[s * dim + e * vectors + i * threads + tx]
                            out[by, bx * vectors + i * threads + tx] = head_of.stored(made, 0, job.dtype)

    names = ["partial", *["positions"] * (not counted), *["sinks"] * split.sinks, "out"]
    return of_numbers(select(kernel, names, "attention_combine"))


def tail(head: HeadVectors, partial, row, of, part, place: int):
    """The number at `place` behind a part's values."""
    found = partial[row, of, part, head.count + place // head.width]
    return f32(head.part(found, place % head.width))


def logarithm(head: HeadVectors, partial, row, of, part):
    """The logarithm of a part's sum of exponentials."""
    return tail(head, partial, row, of, part, 0) + tail(head, partial, row, of, part, 1)


@dataclass(frozen=True)
class Gathered:
    """The rows of a matmul in workgroup memory, combined there by all of its threads."""

    job: Linear

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the buffer with the parts, in vectors."""
        split, heads = self.job.split, self.job.split_heads
        return self.job.m, heads, split.count, (self.job.matrix.k // heads + Split.TAIL) // WIDTH

    def memory(self) -> Any:
        """Declare the rows."""
        job = self.job
        shape = (job.m * job.matrix.k // WIDTH,)
        return IRBuilder.name("gathered", T.alloc_shared(shape, f"{job.x_dtype}x{WIDTH}"))

    def gather(self, x, partial, positions, sinks, lane, threads: int) -> None:
        """Combine all rows; `lane`: the thread's index in the workgroup. Ends with a barrier."""
        job, split, heads, across = self.job, self.job.split, self.job.split_heads, self.job.matrix.k // WIDTH
        vectors, count = across // heads, split.count
        told = IRBuilder.name("told", T.alloc_shared((job.m * heads * count,), "float32"))
        held = IRBuilder.name("part_value", T.alloc_local((AHEAD,), f"{job.x_dtype}x{WIDTH}"))
        acc = IRBuilder.name("gathering", T.alloc_local((1,), f"float32x{WIDTH}"))
        # the maximum, the sum and the weight of a part
        tmp = IRBuilder.name("part_sum", T.alloc_local((3,), "float32"))
        there = IRBuilder.name("parts_there", T.alloc_local((1,), "int32"))
        total = job.m * heads * count
        for turn in range(ceil_div(total, threads)):
            at = turn * threads + lane
            row, head, part = at // (heads * count), at // count % heads, at % count
            with T.If((at < total) & (part < used(split, positions[T.min(row, job.m - 1)]))), T.Then():
                T.buffer_store(told, logarithm(self._head, partial, row, head, part), [at])
        T.evaluate(T.tvm_storage_sync("shared"))
        with T.serial(ceil_div(job.m * across, threads)) as turn:
            at = turn * threads + lane
            with T.If(at < job.m * across), T.Then():
                row, head, vector = at // across, at % across // vectors, at % vectors
                first = (row * heads + head) * count
                T.buffer_store(there, used(split, positions[row]), [0])
                T.buffer_store(tmp, sinks[head] if split.sinks else T.float32(LOWEST), [0])
                with T.serial(there[0]) as part:
                    T.buffer_store(tmp, T.max(tmp[0], told[first + part]), [0])
                T.buffer_store(tmp, T.exp(sinks[head] - tmp[0]) if split.sinks else T.float32(0), [1])
                clear(acc, 1)
                with T.serial((there[0] + AHEAD - 1) // AHEAD) as batch:
                    for p in range(AHEAD):
                        one = T.min(batch * AHEAD + p, there[0] - 1)
                        T.buffer_store(held, partial[row, head, one, vector], [p])
                    for p in range(AHEAD):
                        one = batch * AHEAD + p
                        with T.If(one < there[0]), T.Then():
                            T.buffer_store(tmp, T.exp(told[first + one] - tmp[0]), [2])
                            T.buffer_store(tmp, tmp[1] + tmp[2], [1])
                            T.buffer_store(acc, acc[0] + f32x4(held[p]) * spread(tmp[2]), [0])
                inverse = T.Select(tmp[1] > T.float32(0), T.float32(1) / tmp[1], T.float32(0))
                T.buffer_store(tmp, inverse, [1])
                T.buffer_store(acc, acc[0] * spread(tmp[1]), [0])
                made = [stored(place_of(acc[0], place), job.x_dtype) for place in range(WIDTH)]
                T.buffer_store(x, joined(made), [at])
        T.evaluate(T.tvm_storage_sync("shared"))

    def rows(self, x):
        """The function by which `Sums.add` reads the rows: four inputs of row i as float32."""
        across = self.job.matrix.k // WIDTH
        return lambda i, vector: f32x4(x[i * across + vector])

    @property
    def _head(self) -> HeadVectors:
        return HeadVectors(WIDTH, self.job.matrix.k // self.job.split_heads // WIDTH)


def row_bytes(job: Linear) -> int:
    """Bytes of all rows of a job in the job's dtype, which is also the size of one part."""
    return job.m * job.matrix.k * (4 if job.x_dtype == "float32" else 2)


def gathered_bytes(job: Linear, split: Split, heads: int) -> int:
    """Bytes of workgroup memory in which a matmul joins its rows."""
    return row_bytes(job) + 4 * job.m * heads * split.count
