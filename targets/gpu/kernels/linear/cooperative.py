"""Matrix times many rows (prefill) by cooperative matrices: a subgroup multiplies tiles of 16 by 16.

A workgroup has 64 rows by 64 columns. For 32 inputs at a time its threads bring the rows and the dequantized
weights into workgroup memory as float16; then each subgroup adds products of tiles to its own sums, in
float32, which lanes can read only after they are written to workgroup memory at the end. Enough sums are
declared for the widest subgroup; whole subgroups skip those beyond the last tile. Threads are along x only:
Vulkan requires it for full subgroups.

Rows with a norm are read twice: first for the sum of squares, so that values rounded to float16 are of unit
size (beyond 65,504 they saturate, like all values stored as float16).

Only Vulkan has cooperative matrices (targets/vulkan/cooperative.py); docs/decisions/0018 says which devices
have tiles of this size.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.kernels.common import ceil_div, select, stored
from nearfar.targets.gpu.kernels.linear.epilogue import VALUES, epilogue, sides
from nearfar.targets.gpu.kernels.linear.layout import params
from nearfar.targets.gpu.kernels.script.scales import GroupScales
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import (
    WIDTH,
    Slices,
    at,
    clear,
    f32x4,
    joined,
    of_numbers,
    or_zero,
    quarter,
    scale_buffer,
    spread,
    total,
    word_buffer,
)

ROWS, COLUMNS, TILE_K = 64, 64, 32
THREADS = 256
LEAST_ROWS = ROWS // 2
SIZE = 16  # rows and columns of a tile on NVIDIA's and AMD's cards
WIDEST = 128  # lanes of a subgroup: no device has more
ACROSS_K = TILE_K // WIDTH
WIDE = COLUMNS // WIDTH
FILLS = ROWS * ACROSS_K // THREADS  # vectors of rows that a thread brings
MADE = TILE_K * WIDE // THREADS  # inputs whose weights of four columns a thread makes
X_STRIDE, W_STRIDE, SUM_STRIDE = ACROSS_K + 2, WIDE + 2, WIDE + 1
"""Distances between rows, in vectors: multiples of 16 bytes, padded against bank conflicts."""


def cooperates(job: Linear) -> bool:
    """Whether cooperative matrices can do the job: its rows must be float16, or made small by a norm."""
    small = job.norm is not None or job.x_dtype == "float16"
    plain = not job.rows and job.split is None
    return job.m >= LEAST_ROWS and small and plain and job.matrix.k % MADE == 0


def matmul(job: Linear, size: int = SIZE, widest: int = WIDEST) -> tirx.PrimFunc:
    """The launch for many rows; rows and columns are whole vectors (vectors.fits). `size`: of a tile."""
    m, k, matrix, each = job.m, job.matrix.k, job.matrix, sides(job)
    has_norm, eps = job.norm is not None, job.norm or 0.0
    lanes = WIDE // each
    deep = THREADS // lanes
    slices, group_scales = Slices.of(matrix, MADE), GroupScales(matrix)
    across, tiles = job.columns // WIDTH, ceil_div(k, TILE_K)
    ragged_m, ragged_n, ragged_k = m % ROWS != 0, across % lanes != 0, k % TILE_K != 0
    (words_shape, word_dtype), scales_in = word_buffer(matrix), scale_buffer(matrix)
    beside = COLUMNS // size  # tiles side by side
    sums = ROWS // size * beside
    most = ceil_div(sums * widest, THREADS)  # the most sums of a subgroup

    # These write statements into the kernel below, unrolled.

    def load_tile(word, scale, xs, w0, w1, x, row, tile, column, first, thread):
        """Load a thread's share of a tile into registers; past k the last inputs are loaded again."""
        start = start_of(tile, first)
        slices.bring(word, w0, start, column)
        if matrix.quantized:
            group_scales.load(scale, 0, w1, start // matrix.group, column)
        for j in range(FILLS):
            T.buffer_store(xs, vector_of(x, row[j], tile * ACROSS_K + thread % ACROSS_K), [j])

    def start_of(tile, first):
        """The first input that a thread loads."""
        start = tile * TILE_K + first
        return T.min(start, k - MADE) if ragged_k else start

    def vector_of(x, row, index):
        """Four inputs of a row; zeros beyond k."""
        if not ragged_k:
            return f32x4(x[row, index])
        return or_zero(index * WIDTH < k, f32x4(x[row, T.min(index, k // WIDTH - 1)]))

    def store_tile(wt, xt, word, scale, xs, rstd, norm, tile, first, thread):
        """Write a thread's weights and normalized rows to workgroup memory."""
        if matrix.quantized:
            group_scales.convert(scale, 0, start_of(tile, first) // matrix.group)
        for e in range(MADE):
            value = group_scales.weight(scale, 0, slices.weight(word, first, e))
            T.buffer_store(wt, T.Cast("float16x4", value), [(first + e) * W_STRIDE + thread % WIDE])
        vector = tile * ACROSS_K + thread % ACROSS_K
        for j in range(FILLS):
            value = xs[j]
            if has_norm:
                index = T.min(vector, k // WIDTH - 1) if ragged_k else vector
                T.buffer_store(xs, value * norm[index] * spread(rstd[j]), [j])
                value = joined([stored(at(xs[j], place), "float16") for place in range(WIDTH)])
            else:
                value = T.Cast("float16x4", value)
            place = (j * THREADS + thread) // ACROSS_K * X_STRIDE + thread % ACROSS_K
            T.buffer_store(xt, value, [place])

    def add_products(xt, wt, number, which):
        """Multiply a tile of the rows by a tile of the weights, for all inputs in workgroup memory."""
        for step in range(TILE_K // size):
            a = xt[which // beside * (size * X_STRIDE) + step * (size // WIDTH)]
            b = wt[which % beside * (size // WIDTH) + step * size * W_STRIDE]
            called("add", number, T.address_of(a), X_STRIDE, T.address_of(b), W_STRIDE, size)

    def store_sum(made, number, which):
        place = which // beside * (size * SUM_STRIDE) + which % beside * (size // WIDTH)
        called("store", number, T.address_of(made[place]), SUM_STRIDE, size)

    def called(name, *args):
        T.evaluate(T.call_extern("int32", f"cooperative_{name}", *args))

    def lane(name):
        return T.call_pure_extern("int32", f"subgroup_{name}")

    def row_of(by, r, ty):
        return by * ROWS + r * deep + ty

    @prim_func
    def kernel(
        x: T.Buffer((m, k // WIDTH), f"{job.x_dtype}x{WIDTH}"),
        norm: T.Buffer((k // WIDTH,), f"float32x{WIDTH}"),
        w0: T.Buffer(words_shape, word_dtype),
        w1: T.Buffer(*scales_in),
        bias: T.Buffer(quarter((job.of or matrix.n,)), f"float32x{WIDTH}"),
        residual: T.Buffer(quarter((m, job.width)), f"{job.out_dtype}x{WIDTH}"),
        out: T.Buffer(quarter(job.out[0]), f"{job.out_dtype}x{WIDTH}"),
    ):
        for bx in T.thread_binding(ceil_div(across, lanes), thread="blockIdx.x"):
            for by in T.thread_binding(ceil_div(m, ROWS), thread="blockIdx.y"):
                for thread in T.thread_binding(THREADS, thread="threadIdx.x"):
                    xt = T.alloc_shared((ROWS * X_STRIDE,), "float16x4")
                    wt = T.alloc_shared((TILE_K * W_STRIDE,), "float16x4")
                    made = T.alloc_shared((ROWS * SUM_STRIDE,), "float32x4")
                    squares = T.alloc_shared((FILLS * THREADS if has_norm else 1,), "float32")
                    square = T.alloc_local((FILLS,), "float32x4")
                    xs = T.alloc_local((FILLS,), "float32x4")
                    word = T.alloc_local((slices.words,), word_dtype)
                    scale = T.meta_var(group_scales.declare())
                    row = T.alloc_local((FILLS,), "int32")
                    value = T.alloc_local((VALUES,), "float32")
                    rstd = T.alloc_local((FILLS,), "float32")
                    ty: T.let = thread // lanes
                    tx: T.let = thread % lanes
                    first: T.let = thread // WIDE * MADE
                    brought: T.let = bx * lanes + thread % WIDE % lanes
                    column: T.let = (T.min(brought, across - 1) if ragged_n else brought) + (
                        thread % WIDE // lanes * across
                    )
                    for j in T.unroll(FILLS):
                        row[j] = by * ROWS + (j * THREADS + thread) // ACROSS_K
                        if ragged_m:
                            row[j] = T.min(row[j], m - 1)
                    if has_norm:
                        clear(square, FILLS)
                        for tile in T.serial(tiles):
                            for j in T.unroll(FILLS):
                                xs[j] = vector_of(x, row[j], tile * ACROSS_K + thread % ACROSS_K)
                                square[j] = square[j] + xs[j] * xs[j]
                        for j in T.unroll(FILLS):
                            squares[j * THREADS + thread] = total(square[j])
                        T.tvm_storage_sync("shared")
                        for j in T.unroll(FILLS):
                            rstd[j] = T.float32(0)
                            for v in T.unroll(ACROSS_K):
                                rstd[j] = rstd[j] + squares[(j * THREADS + thread) // ACROSS_K * ACROSS_K + v]
                            rstd[j] = T.rsqrt(rstd[j] * T.float32(1.0 / k) + T.float32(eps))
                    for r in T.unroll(most):
                        called("clear", r, size)
                    load_tile(word, scale, xs, w0, w1, x, row, 0, column, first, thread)
                    for tile in T.serial(tiles):
                        store_tile(wt, xt, word, scale, xs, rstd, norm, tile, first, thread)
                        T.tvm_storage_sync("shared")
                        following: T.let = T.min(tile + 1, tiles - 1)
                        load_tile(word, scale, xs, w0, w1, x, row, following, column, first, thread)
                        for r in T.unroll(most):
                            which: T.let = lane("id") + r * lane("count")
                            if which < sums:
                                add_products(xt, wt, r, which)
                        T.tvm_storage_sync("shared")
                    for r in T.unroll(most):
                        which: T.let = lane("id") + r * lane("count")
                        if which < sums:
                            store_sum(made, r, which)
                    T.tvm_storage_sync("shared")
                    for r in T.unroll(ROWS // deep):
                        if (not ragged_m or row_of(by, r, ty) < m) and (
                            not ragged_n or bx * lanes + tx < across
                        ):
                            epilogue(
                                job, value,
                                [
                                    made[(r * deep + ty) * SUM_STRIDE + side * lanes + tx]
                                    for side in range(each)
                                ],
                                bias, residual, out, row_of(by, r, ty), bx * lanes + tx,
                            )  # fmt: skip

    return of_numbers(select(kernel, params(job), "matmul"))
