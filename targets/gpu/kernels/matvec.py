"""Matrix times few rows (decode) on a GPU: what counts is how many bytes of the matrix are under way.

A lane owns four neighbouring columns and reads a row of their words as one vector of 16 bytes; `LANES` lanes
side by side read a segment of 128 bytes. The rest of a workgroup lies along k: a lane loads all words and
scales of a batch before it uses the first, and one barrier joins the lanes' sums in workgroup memory, where
each row of the result is added up by lanes of its own.

A code becomes a float32 without a conversion (see vectors.weight). Products are float32, in f16 programs too:
where the norm is fused rstd comes at the end, so inputs may be of any size, a float16 sum of 8 codes times
inputs overflows from inputs of 546 on, and a scale that prevents it loses small inputs; at one row a lane
waits for memory, not for arithmetic. (Packed products of int8 or float16 would be a second `_unit`, a
subgroup's sum would stand before `part` is written: both are another summation, so variants of their own.)
Scale and bias stay out of the inner loop, and the norm's sum of squares is taken on the way, as in the
software kernels.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sizes import MAX_ROWS
from nearfar.targets.gpu.classes import SHARED_BYTES, DeviceClass, Tuning
from nearfar.targets.gpu.packing import parts
from nearfar.targets.jobs import Linear

from .common import ceil_div, select
from .epilogue import VALUES, epilogue, sides
from .layout import params
from .script import prim_func
from .vectors import (
    WIDTH,
    Reader,
    at,
    clear,
    f32x4,
    high_halves,
    low_halves,
    of_numbers,
    or_zero,
    quarter,
    scale_buffer,
    spread,
    total,
    word_buffer,
)

LANES = 8  # times 16 bytes: a segment of 128
AHEAD = 8  # words of a lane that are loaded before the first is used
LARGE = 1 << 20  # bytes of a matrix from which on a launch should have the threads of its class
LONGEST = 128  # batches of a row over the most lanes along k: with so many steps a lane may wait for memory
FULL = 0.9  # share of the lanes' steps that should have something to do


@dataclass(frozen=True)
class Tiling:
    """`splits` lanes along k; a lane takes `steps` batches of `batch` chunks of `units` units each.

    The chunks of a step lie side by side: lane y has chunk (step · batch + b) · splits + y of `chunks`.
    """

    splits: int
    units: int
    chunks: int
    batch: int
    steps: int

    @property
    def ragged(self) -> bool:
        """Whether some lanes have less to do."""
        return self.splits * self.batch * self.steps != self.chunks


def tiling(job: Linear, device: DeviceClass) -> Tiling:
    """The fewest lanes along k with which the launch has its threads and bytes under way, in few steps."""
    size = sum(math.prod(part.shape) * 4 for part in parts(job.matrix))
    launched = device.launched if size >= LARGE else 0
    made = [_split(job, splits) for splits in _splits(job, device)]
    for plan in made:
        enough = _in_flight(job, plan) >= min(device.in_flight, size * FULL)
        if enough and _threads(job, plan) >= launched and plan.steps <= LONGEST // device.k_lanes:
            return plan
    return made[-1]


def _splits(job: Linear, device: DeviceClass) -> list[int]:
    """Powers of two that make whole subgroups and whose sums fit into workgroup memory."""
    counts = [1 << i for i in range(device.k_lanes.bit_length())]
    return [
        splits
        for splits in counts
        if LANES * splits % device.subgroup == 0
        and ((splits - 1) * LANES * sides(job) * WIDTH + splits) * job.m * 4 <= SHARED_BYTES
    ]


def _split(job: Linear, splits: int) -> Tiling:
    """Chunks as large as keep nearly all lanes busy: a chunk of less than a group reads its scale again."""
    reader = Reader.of(job.matrix)
    ahead = max(AHEAD // (reader.words * sides(job)), 1)  # units
    whole = job.matrix.group // reader.inputs if job.matrix.quantized else ahead
    sizes = [size for size in range(min(whole, ahead), 0, -1) if whole % size == reader.count % size == 0]

    def busy(size: int) -> float:
        chunks = reader.count // size
        return chunks / (ceil_div(chunks, splits) * splits)

    best = max(busy(size) for size in sizes)
    size = next(size for size in sizes if busy(size) >= min(best, FULL))
    each = ceil_div(reader.count // size, splits)
    most = max(ahead * 3 // 2 // size, 1)
    batch = max(count for count in range(1, most + 1) if each % count == 0)
    return Tiling(splits, size, reader.count // size, batch, each // batch)


def _threads(job: Linear, plan: Tiling) -> int:
    return ceil_div(job.columns // WIDTH, LANES) * LANES * plan.splits


def _in_flight(job: Linear, plan: Tiling) -> int:
    """Bytes of the matrix that all threads ask for at once."""
    loads = plan.batch * (plan.units * Reader.of(job.matrix).words + job.matrix.quantized)
    return _threads(job, plan) * loads * sides(job) * 16


def matvec(job: Linear, tuning: Tuning) -> tirx.PrimFunc:
    """One launch for small m; rows and columns are whole vectors (vectors.fits)."""
    m, k, matrix = job.m, job.matrix.k, job.matrix
    has_norm, eps, quantized = job.norm is not None, job.norm or 0.0, matrix.quantized
    plan, reader, each = tiling(job, tuning.device), Reader.of(matrix), sides(job)
    splits, batch = plan.splits, plan.batch
    across = job.columns // WIDTH
    ragged_n = across % LANES != 0
    own = ceil_div(m, splits)  # rows of the result that a lane finishes
    inputs, words, vectors = reader.inputs, reader.words, reader.inputs // WIDTH
    chunk_inputs, chunk_words = plan.units * inputs, plan.units * words
    (words_shape, word_dtype), (scales_shape, scale_dtype) = word_buffer(matrix), scale_buffer(matrix)

    # These write statements into the kernel below, unrolled.

    def load_words(word, scale, w0, w1, chunk, b, column):
        """All that chunk `b` of a batch reads of the matrix."""
        for side in range(each):
            place, start = column + side * across, (b * each + side) * chunk_words
            for unit in range(plan.units):
                for i in range(words):
                    value = reader.load(w0, chunk * plan.units + unit, i, place)
                    T.buffer_store(word, value, [start + unit * words + i])
            if quantized:
                T.buffer_store(scale, w1[chunk * chunk_inputs // matrix.group, place], [b * each + side])

    def load_inputs(xs, square, xsum, x, norm, row, vector, valid):
        """Four inputs of all rows, times the norm's weights; what they add to sums."""
        for i in range(m):
            value = f32x4(x[row[i], vector])
            T.buffer_store(xs, or_zero(valid, value) if plan.ragged else value, [i])
            if has_norm:
                T.buffer_store(square, square[i] + xs[i] * xs[i], [i])
                T.buffer_store(xs, xs[i] * norm[vector], [i])
            if quantized:
                T.buffer_store(xsum, xsum[i] + xs[i], [i])

    def add_products(dot, weights, upper, xs, word, start, v):
        """Weights of four inputs of a unit, each made once for all rows, times these."""
        for side in range(each):
            first = start + side * chunk_words
            held = [word[first + i] for i in range(words)]
            if reader.has_upper and v == inputs // 2 // WIDTH:
                T.buffer_store(upper, reader.upper(held), [side])
            for place in range(WIDTH):
                made = reader.weight(held, v * WIDTH + place, upper[side])
                T.buffer_store(weights, made, [place])
            for i in range(m):
                added = dot[i * each + side]
                for place in range(WIDTH):
                    added = added + weights[place] * spread(at(xs[i], place))
                T.buffer_store(dot, added, [i * each + side])

    def add_chunk(acc, dot, xsum, scale, b):
        """Scale · Σ q·x + bias · Σ x of a group, or of a part of it."""
        for i in range(m):
            for side in range(each):
                value, place = dot[i * each + side], i * each + side
                if quantized:
                    pair = scale[b * each + side]
                    value = low_halves(pair) * value + high_halves(pair) * spread(total(xsum[i]))
                T.buffer_store(acc, acc[place] + value, [place])

    def run_chunk(acc, square, dot, xsum, xs, weights, upper, word, scale, x, norm, row, chunk, b, valid):
        """All of chunk `b` of a batch, whose words are there."""
        clear(dot, m * each)
        clear(xsum, m)
        for unit in range(plan.units):
            for v in range(vectors):
                vector = (chunk * plan.units + unit) * vectors + v
                load_inputs(xs, square, xsum, x, norm, row, vector, valid)
                add_products(dot, weights, upper, xs, word, b * each * chunk_words + unit * words, v)
        add_chunk(acc, dot, xsum, scale, b)

    def chunk_of(step, b, ty):
        return (step * batch + b) * splits + ty

    def run_batch(
        acc, square, dot, xsum, xs, weights, upper, word, scale, x, norm, w0, w1, row, step, ty, column
    ):
        """Every word of a batch is loaded before the first is used."""
        for b in range(batch):
            load_words(word, scale, w0, w1, inside(chunk_of(step, b, ty)), b, column)
        for b in range(batch):
            chunk = chunk_of(step, b, ty)
            valid = chunk < plan.chunks
            run_chunk(
                acc, square, dot, xsum, xs, weights, upper, word, scale, x, norm, row, inside(chunk), b, valid
            )

    def inside(chunk):
        return T.min(chunk, plan.chunks - 1) if plan.ragged else chunk

    def slot(i, lane, side, tx):
        """Where a lane leaves its sums of row i: all lanes but the owner of the row, in turn after it."""
        turn = (lane + splits - 1 - i % splits) % splits
        return ((i * (splits - 1) + turn) * each + side) * LANES + tx

    @prim_func
    def kernel(
        x: T.Buffer((job.x_rows or m, k // WIDTH), f"{job.x_dtype}x{WIDTH}"),
        logit_rows: T.Buffer((MAX_ROWS,), "int32"),
        norm: T.Buffer((k // WIDTH,), f"float32x{WIDTH}"),
        w0: T.Buffer(words_shape, word_dtype),
        w1: T.Buffer(scales_shape, scale_dtype),
        bias: T.Buffer(quarter((job.of or matrix.n,)), f"float32x{WIDTH}"),
        residual: T.Buffer(quarter((m, job.width)), f"{job.out_dtype}x{WIDTH}"),
        out: T.Buffer(quarter(job.out[0]), f"{job.out_dtype}x{WIDTH}"),
    ):
        for bx in T.thread_binding(ceil_div(across, LANES), thread="blockIdx.x"):
            for ty in T.thread_binding(splits, thread="threadIdx.y"):
                for tx in T.thread_binding(LANES, thread="threadIdx.x"):
                    part = T.alloc_shared((max((splits - 1) * m * each * LANES, 1),), "float32x4")
                    squares = T.alloc_shared((splits * m if has_norm else 1,), "float32")
                    acc = T.alloc_local((m * each,), "float32x4")
                    mine = T.alloc_local((own * each,), "float32x4")
                    square = T.alloc_local((m,), "float32x4")
                    dot = T.alloc_local((m * each,), "float32x4")
                    xsum = T.alloc_local((m,), "float32x4")
                    xs = T.alloc_local((m,), "float32x4")
                    weights = T.alloc_local((WIDTH,), "float32x4")
                    upper = T.alloc_local((each,), "uint32x4")
                    word = T.alloc_local((batch * each * chunk_words,), word_dtype)
                    scale = T.alloc_local((batch * each,), "uint32x4")
                    value = T.alloc_local((VALUES,), "float32")
                    rstd = T.alloc_local((1,), "float32")
                    row = T.alloc_local((m,), "int32")
                    column: T.let = bx * LANES + tx
                    for i in T.unroll(m):
                        row[i] = logit_rows[i] if job.rows else i
                    clear(acc, m * each)
                    clear(square, m)
                    for step in T.serial(plan.steps):
                        run_batch(
                            acc, square, dot, xsum, xs, weights, upper, word, scale, x, norm, w0, w1, row,
                            step, ty, T.min(column, across - 1) if ragged_n else column,
                        )  # fmt: skip
                    for i in T.unroll(m):
                        if ty == i % splits:
                            for side in T.unroll(each):
                                mine[i // splits * each + side] = acc[i * each + side]
                        else:
                            for side in T.unroll(each):
                                part[slot(i, ty, side, tx)] = acc[i * each + side]
                        if has_norm and tx == 0:
                            squares[i * splits + ty] = total(square[i])
                    T.tvm_storage_sync("shared")
                    for r in T.unroll(own):
                        i: T.let = r * splits + ty
                        if i < m and (not ragged_n or column < across):
                            for side in T.unroll(each):
                                for lane in T.unroll(splits - 1):
                                    mine[r * each + side] = (
                                        mine[r * each + side] + part[slot(i, ty + 1 + lane, side, tx)]
                                    )
                            if has_norm:
                                rstd[0] = T.float32(0)
                                for lane in T.unroll(splits):
                                    rstd[0] = rstd[0] + squares[i * splits + lane]
                                rstd[0] = T.rsqrt(rstd[0] * T.float32(1.0 / k) + T.float32(eps))
                                for side in T.unroll(each):
                                    mine[r * each + side] = mine[r * each + side] * spread(rstd[0])
                            epilogue(
                                job, value, [mine[r * each + s] for s in range(each)], bias, residual, out, i,
                                column,
                            )  # fmt: skip

    return of_numbers(select(kernel, params(job), "matvec"))
