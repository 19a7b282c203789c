"""Matrix times many rows (prefill): a thread has a register tile of 8 rows of x by 8 columns.

For a gated pair these are 4 and 4 columns. Weights go straight to registers: a word has 8 (q4) or 4 (q8)
weights of a column, and neighbours read neighbouring words. Only x, which all threads of a workgroup need,
goes through workgroup memory, 8 or 16 inputs of 8 rows at a time, so that every index into it is a literal:
for that SwiftShader makes one load and a broadcast, but four branches for a load at an unknown index. As in
the matvec, the norm's rstd is applied at the end; each thread fills the tile from one row only, so it can sum
that row's squares on the way.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.kernels.activations import activated, capped
from nearfar.targets.gpu.kernels.common import ceil_div, f32, select, stored
from nearfar.targets.gpu.kernels.linear.layout import (
    Units,
    column_of,
    dense_element,
    lanes_for,
    loaded_column,
    neighbours,
    params,
    place_factor,
    placed_code,
    scale_and_bias,
    scale_shape,
    top_code_offset,
    word_shape,
)
from nearfar.targets.gpu.kernels.script.text import prim_func

TILE_M, TILE_N = 8, 8
TILE_K = 8  # inputs of a tile of x
# The number of inputs in one expression: SwiftShader masks every store to a local, so a store should add four
# products.
UNROLLED = 4


def products(xs, w, at, count: int):
    """The sum of `count` inputs from xs[at] on, times weights."""
    total = xs[at] * w[0]
    for e in range(1, count):
        total = total + xs[at + e] * w[e]
    return total


def divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` up to the limit."""
    return next(size for size in range(min(value, limit), 0, -1) if value % size == 0)


def matmul(job: Linear, vectors: bool = False) -> tirx.PrimFunc:
    """The launch of `job` for m of 8 and more; `vectors` as in matvec."""
    m, k, bits = job.m, job.matrix.k, job.matrix.bits
    quantized, gated, has_norm, eps = (
        job.matrix.quantized,
        job.gate is not None,
        job.norm is not None,
        job.norm or 0.0,
    )
    n_out = job.columns
    is_simple = not gated and job.softcap is None
    outs = TILE_N // 2 if gated else TILE_N  # output columns of a thread
    lanes = lanes_for(n_out, outs)
    block = lanes * outs
    beside = neighbours(job, outs, vectors)
    units = Units.of(job.matrix)
    unit, words, placed = units.inputs, units.words, units.placed
    chunk = min(unit, UNROLLED)
    words_shape, word_dtype = word_shape(job.matrix)
    tile_units = divisor(units.count, max(TILE_K // unit, 1))
    tile_k = tile_units * unit
    group_units = job.matrix.group // unit if quantized else tile_units
    fillers = lanes // TILE_M  # threads that fill a row of the tile
    ragged_m, ragged_n = m % TILE_M != 0, n_out % block != 0
    ragged = k % unit != 0 or tile_k % fillers != 0

    def row_of(bx, tx, r):
        """Matrix row `r` of a thread; for a gated pair first the gate rows, then their up rows."""
        column = loaded_column(bx, tx, r % outs, lanes, outs, beside, n_out - 1 if ragged_n else None)
        return column + r // outs * n_out

    def x_row(by, i):
        return T.min(by * TILE_M + i, m - 1) if ragged_m else by * TILE_M + i

    def weight(word, scale, offset, top, r, e):
        """Weight `e` of a unit; placed codes are multiplied by 2^(bits*e), and their inputs divided by it."""
        if not quantized:
            return dense_element(word[r], bits, e)
        if not placed:
            return units.code(word, r * words, e) * scale[r] + offset[r]
        place = T.float32(1) / place_factor(bits, e)
        return placed_code(word[r], bits, e) * scale[r] + T.Select(e == unit - 1, top[r], offset[r]) * place

    def simple(value, bias, residual, row, column):
        """Add the bias, and, if nothing comes between, the residual."""
        value = value + bias[column] if job.bias else value
        return value + f32(residual[row, column]) if job.residual and is_simple else value

    @prim_func
    def kernel(
        x: T.Buffer((job.x_rows or m, k), job.x_dtype),
        logit_rows: T.Buffer((MAX_ROWS,), "int32"),
        norm: T.Buffer((k,), "float32"),
        w0: T.Buffer(words_shape, word_dtype),
        w1: T.Buffer(scale_shape(job.matrix), "uint32"),
        bias: T.Buffer((job.of or job.matrix.n,), "float32"),
        residual: T.Buffer((m, job.width), job.out_dtype),
        out: T.Buffer(job.out[0], job.out_dtype),
    ):
        for bx in T.thread_binding(ceil_div(n_out, block), thread="blockIdx.x"):
            for by in T.thread_binding(ceil_div(m, TILE_M), thread="blockIdx.y"):
                for tx in T.thread_binding(lanes, thread="threadIdx.x"):
                    acc = T.alloc_local((TILE_M * TILE_N,), "float32")
                    sq = T.alloc_local((1,), "float32")
                    xs = T.alloc_local((TILE_M * chunk,), "float32")
                    w = T.alloc_local((chunk,), "float32")
                    word = T.alloc_local((TILE_N * words,), word_dtype)
                    scale = T.alloc_local((TILE_N,), "float32")
                    offset = T.alloc_local((TILE_N,), "float32")
                    top = T.alloc_local((TILE_N,), "float32")  # offset of a word's top code
                    value = T.alloc_local((2,), "float32")
                    row = T.alloc_local((TILE_N,), "int32")
                    xt = T.alloc_shared(
                        (max(ceil_div(tile_k, fillers) * fillers * TILE_M, lanes),), "float32"
                    )
                    at = T.alloc_local((3,), "int32")
                    for r in T.unroll(TILE_N):
                        row[r] = row_of(bx, tx, r)
                    at[2] = x_row(by, tx // fillers)  # the row that this thread fills
                    if job.rows:
                        at[2] = logit_rows[at[2]]
                    sq[0] = T.float32(0)
                    for i in T.unroll(TILE_M * TILE_N):
                        acc[i] = T.float32(0)
                    for g in T.serial(units.count // group_units):
                        if quantized:
                            for r in T.unroll(TILE_N):
                                both = T.meta_var(scale_and_bias(job.matrix, w1, g, row[r]))
                                scale[r] = both[0]
                                offset[r] = both[1]
                                top[r] = offset[r] + scale[r] * T.float32(top_code_offset(bits))
                        for j in T.serial(group_units // tile_units):
                            for t in T.unroll(ceil_div(tile_k, fillers)):
                                at[0] = t * fillers + tx % fillers
                                at[1] = (g * group_units + j * tile_units) * unit + at[0]
                                value[0] = f32(x[at[2], T.min(at[1], k - 1) if ragged else at[1]])
                                if (
                                    ragged
                                ):  # beyond k (odd k of pairs), or beyond the tile, where no thread reads
                                    value[0] = T.Select(at[0] < tile_k and at[1] < k, value[0], T.float32(0))
                                if has_norm:
                                    sq[0] = sq[0] + value[0] * value[0]
                                    value[0] = value[0] * norm[T.min(at[1], k - 1) if ragged else at[1]]
                                if placed:
                                    value[0] = value[0] * place_factor(bits, at[0] % unit)
                                xt[at[0] * TILE_M + tx // fillers] = value[0]
                            T.tvm_storage_sync("shared")
                            for v in T.unroll(tile_units):
                                for r in T.unroll(TILE_N):
                                    for i in T.unroll(words):
                                        word[r * words + i] = units.load(
                                            w0, g * group_units + j * tile_units + v, i, row[r]
                                        )
                                for part in T.unroll(unit // chunk):
                                    for e in T.unroll(chunk):
                                        for i in T.unroll(TILE_M):
                                            xs[i * chunk + e] = xt[(v * unit + part * chunk + e) * TILE_M + i]
                                    for r in T.unroll(TILE_N):
                                        for e in T.unroll(chunk):
                                            w[e] = weight(word, scale, offset, top, r, part * chunk + e)
                                        for i in T.unroll(TILE_M):
                                            acc[i * TILE_N + r] = acc[i * TILE_N + r] + products(
                                                xs, w, i * chunk, chunk
                                            )
                            T.tvm_storage_sync("shared")
                    if has_norm:
                        xt[tx] = sq[0]
                        T.tvm_storage_sync("shared")
                    for i in T.unroll(TILE_M):
                        at[0] = by * TILE_M + i
                        if not ragged_m or at[0] < m:
                            if has_norm:
                                sq[0] = T.float32(0)
                                for t in T.unroll(fillers):
                                    sq[0] = sq[0] + xt[i * fillers + t]
                                sq[0] = T.rsqrt(sq[0] * T.float32(1.0 / k) + T.float32(eps))
                                for r in T.unroll(TILE_N):
                                    acc[i * TILE_N + r] = acc[i * TILE_N + r] * sq[0]
                            for r in T.unroll(outs):
                                at[1] = column_of(bx, tx, r, lanes, outs, beside)
                                if not ragged_n or at[1] < n_out:
                                    value[0] = simple(
                                        acc[i * TILE_N + r], bias, residual, at[0], at[1] + job.first
                                    )
                                    if gated:
                                        value[1] = acc[i * TILE_N + outs + r]
                                        if job.bias:
                                            value[1] = value[1] + bias[n_out + at[1]]
                                        value[0] = activated(job.gate, value[0]) * value[1]
                                    if job.softcap is not None:
                                        value[0] = capped(value[0], job.softcap)
                                    if job.residual and not is_simple:
                                        value[0] = value[0] + f32(residual[at[0], at[1] + job.first])
                                    out[at[0], at[1] + job.first] = stored(value[0], job.out_dtype)

    return select(kernel, params(job), "matmul")
