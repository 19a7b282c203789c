"""Matrix times many rows (prefill) on a GPU: each weight is made once a workgroup, then used by all its rows.

A workgroup has a tile of rows by columns. Of 32 inputs at a time all its threads together bring the rows and
the dequantized weights into workgroup memory (weights as float16 in f16 programs), four numbers a vector; a
thread then adds products for four rows by four columns, of a gated pair two rows by both columns' four. The
words of the next 32 inputs are asked for before the products of these, so that they arrive behind them. Two
tiles where both fit, and then one barrier for 32 inputs, else two.

Products and sums are float32, and rows are float32 in workgroup memory where a norm or the residual stream
makes them large (see matvec). As there the norm's rstd comes at the end: a thread fills parts of the same
rows from first to last and sums their squares. (Cooperative matrices and packed int8 products would take the
place of `add_tile`, over the same tiles.)
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sizes import MAX_ROWS
from nearfar.targets.gpu.classes import Tuning
from nearfar.targets.jobs import Linear

from .common import ceil_div, select
from .epilogue import VALUES, epilogue, sides
from .layout import params
from .script import prim_func
from .vectors import (
    WIDTH,
    Slices,
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

TILE_K = 32
BLOCK = 16  # outputs of a thread, twice as many sums where gated
ACROSS_K = TILE_K // WIDTH


@dataclass(frozen=True)
class Tiling:
    """A workgroup's `rows` by `columns` of the matrix, in workgroup memory of `copies` tiles.

    `lanes` threads lie across its columns of the output, `deep` along its rows, of which each has `own`; a
    thread fills `x_fills` vectors of rows and `made` inputs of four columns.
    """

    rows: int
    columns: int
    lanes: int
    deep: int
    x_dtype: str
    w_dtype: str
    memory: int

    @property
    def threads(self) -> int:
        """Of a workgroup."""
        return self.lanes * self.deep

    @property
    def own(self) -> int:
        """Rows of a thread."""
        return self.rows // self.deep

    @property
    def x_fills(self) -> int:
        """Vectors of rows that a thread brings."""
        return self.rows * ACROSS_K // self.threads

    @property
    def made(self) -> int:
        """Inputs, one after the other, whose weights of four columns a thread makes."""
        return TILE_K * self.columns // WIDTH // self.threads

    @property
    def copies(self) -> int:
        """Tiles that fit into `memory` bytes of a workgroup, at most two."""
        size = {"float32": 4, "float16": 2}
        one = TILE_K * (self.rows * size[self.x_dtype] + self.columns * size[self.w_dtype])
        return 2 if 2 * one <= self.memory else 1


def tiling(job: Linear, tuning: Tuning) -> Tiling:
    """The class's tile, flatter where there are fewer rows."""
    most, columns = tuning.device.tile
    rows = next((size for size in (16, 32) if job.m <= size < most), most)
    lanes = columns // WIDTH // sides(job)
    deep = max(rows * columns // BLOCK, tuning.device.subgroup) // lanes
    narrow = tuning.half and job.x_dtype == "float16" and job.norm is None
    x_dtype, w_dtype = ("float16" if small else "float32" for small in (narrow, tuning.half))
    return Tiling(rows, columns, lanes, deep, x_dtype, w_dtype, tuning.device.shared_bytes)


def matmul(job: Linear, tuning: Tuning) -> tirx.PrimFunc:
    """One launch of `job` for many rows; rows and columns are whole vectors (vectors.fits)."""
    m, k, matrix = job.m, job.matrix.k, job.matrix
    has_norm, eps, quantized = job.norm is not None, job.norm or 0.0, matrix.quantized
    plan, each = tiling(job, tuning), sides(job)
    lanes, threads, own, made, copies = plan.lanes, plan.threads, plan.own, plan.made, plan.copies
    slices = Slices.of(matrix, made)
    across, wide, tiles = job.columns // WIDTH, plan.columns // WIDTH, ceil_div(k, TILE_K)
    ragged_m, ragged_n, ragged_k = m % plan.rows != 0, across % lanes != 0, k % TILE_K != 0
    (words_shape, word_dtype), (scales_shape, scale_dtype) = word_buffer(matrix), scale_buffer(matrix)
    x_vector, w_vector = f"{plan.x_dtype}x{WIDTH}", f"{plan.w_dtype}x{WIDTH}"
    x_size, w_size = plan.rows * ACROSS_K, TILE_K * wide

    # These write statements into the kernel below, unrolled.

    def load_tile(word, scale, xs, w0, w1, x, row, tile, column, first, thread):
        """What the thread brings of a tile, into registers; beyond k the last that there is."""
        start = tile * TILE_K + first
        start = T.min(start, k - made) if ragged_k else start
        for i in range(slices.words):
            T.buffer_store(word, slices.load(w0, start, i, column), [i])
        if quantized:
            T.buffer_store(scale, w1[start // matrix.group, column], [0])
        vector = tile * ACROSS_K + thread % ACROSS_K
        for j in range(plan.x_fills):
            index = T.min(vector, k // WIDTH - 1) if ragged_k else vector
            value = f32x4(x[row[j], index])
            T.buffer_store(xs, or_zero(vector * WIDTH < k, value) if ragged_k else value, [j])

    def store_tile(wt, xt, word, scale, xs, square, norm, tile, first, thread, copy):
        """The weights made, the rows times the norm's weights, into workgroup memory."""
        for e in range(made):
            value = slices.weight(word, first, e)
            if quantized:
                value = low_halves(scale[0]) * value + high_halves(scale[0])
            place = copy * w_size + (first + e) * wide + thread % wide
            T.buffer_store(wt, T.Cast(w_vector, value) if tuning.half else value, [place])
        vector = tile * ACROSS_K + thread % ACROSS_K
        for j in range(plan.x_fills):
            value = xs[j]
            if has_norm:
                T.buffer_store(square, square[j] + value * value, [j])
                value = value * norm[T.min(vector, k // WIDTH - 1) if ragged_k else vector]
            value = T.Cast(x_vector, value) if plan.x_dtype == "float16" else value
            T.buffer_store(xt, value, [copy * x_size + j * threads + thread])

    def add_tile(acc, xs, weight, xt, wt, copy, step, tx, ty):
        """Products of four inputs: a thread's rows by its columns."""
        for r in range(own):
            place = copy * x_size + (r * plan.deep + ty) * ACROSS_K + step
            T.buffer_store(xs, f32x4(xt[place]) if plan.x_dtype == "float16" else xt[place], [r])
        for e in range(WIDTH):
            for side in range(each):
                value = wt[copy * w_size + (step * WIDTH + e) * wide + side * lanes + tx]
                T.buffer_store(weight, f32x4(value) if tuning.half else value, [side])
            for r in range(own):
                for side in range(each):
                    place = r * each + side
                    T.buffer_store(acc, acc[place] + weight[side] * spread(at(xs[r], e)), [place])

    def row_of(by, r, ty):
        return by * plan.rows + r * plan.deep + ty

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
        for bx in T.thread_binding(ceil_div(across, lanes), thread="blockIdx.x"):
            for by in T.thread_binding(ceil_div(m, plan.rows), thread="blockIdx.y"):
                for ty in T.thread_binding(plan.deep, thread="threadIdx.y"):
                    for tx in T.thread_binding(lanes, thread="threadIdx.x"):
                        xt = T.alloc_shared((copies * x_size,), x_vector)
                        wt = T.alloc_shared((copies * w_size,), w_vector)
                        acc = T.alloc_local((own * each,), "float32x4")
                        square = T.alloc_local((plan.x_fills,), "float32x4")
                        fill = T.alloc_local((plan.x_fills,), "float32x4")
                        xs = T.alloc_local((own,), "float32x4")
                        weight = T.alloc_local((each,), "float32x4")
                        word = T.alloc_local((slices.words,), word_dtype)
                        scale = T.alloc_local((1,), "uint32x4")
                        row = T.alloc_local((plan.x_fills,), "int32")
                        value = T.alloc_local((VALUES,), "float32")
                        rstd = T.alloc_local((1,), "float32")
                        thread: T.let = ty * lanes + tx
                        first: T.let = thread // wide * made
                        brought: T.let = bx * lanes + thread % wide % lanes
                        column: T.let = (T.min(brought, across - 1) if ragged_n else brought) + (
                            thread % wide // lanes * across
                        )
                        for j in T.unroll(plan.x_fills):
                            row[j] = by * plan.rows + (j * threads + thread) // ACROSS_K
                            if ragged_m:
                                row[j] = T.min(row[j], m - 1)
                            if job.rows:
                                row[j] = logit_rows[row[j]]
                        clear(acc, own * each)
                        clear(square, plan.x_fills)
                        load_tile(word, scale, fill, w0, w1, x, row, 0, column, first, thread)
                        for tile in T.serial(tiles):
                            copy: T.let = tile % copies
                            store_tile(wt, xt, word, scale, fill, square, norm, tile, first, thread, copy)
                            T.tvm_storage_sync("shared")
                            following: T.let = T.min(tile + 1, tiles - 1)
                            load_tile(word, scale, fill, w0, w1, x, row, following, column, first, thread)
                            for step in T.serial(ACROSS_K):
                                add_tile(acc, xs, weight, xt, wt, copy, step, tx, ty)
                            if copies == 1:
                                T.tvm_storage_sync("shared")
                        if has_norm:
                            if copies == 2:  # others may still read the last tile
                                T.tvm_storage_sync("shared")
                            for j in T.unroll(plan.x_fills):
                                xt[j * threads + thread] = square[j]
                            T.tvm_storage_sync("shared")
                        for r in T.unroll(own):
                            if (not ragged_m or row_of(by, r, ty) < m) and (
                                not ragged_n or bx * lanes + tx < across
                            ):
                                if has_norm:
                                    rstd[0] = T.float32(0)
                                    for v in T.unroll(ACROSS_K):
                                        rstd[0] = rstd[0] + total(xt[(r * plan.deep + ty) * ACROSS_K + v])
                                    rstd[0] = T.rsqrt(rstd[0] * T.float32(1.0 / k) + T.float32(eps))
                                    for side in T.unroll(each):
                                        acc[r * each + side] = acc[r * each + side] * spread(rstd[0])
                                epilogue(
                                    job, value, [acc[r * each + side] for side in range(each)], bias,
                                    residual, out, row_of(by, r, ty), bx * lanes + tx,
                                )  # fmt: skip

    return of_numbers(select(kernel, params(job), "matmul"))
