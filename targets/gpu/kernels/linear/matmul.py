"""Matrix times many rows (prefill) on a GPU: a workgroup makes each weight once, and all its rows use it.

A workgroup has a tile of rows by columns. For 32 inputs at a time its threads together bring the rows and the
weights into workgroup memory, four numbers in a vector; a thread then adds products for four rows by four
columns, or, for a gated pair, two rows by four columns of each. The words of the next 32 inputs are loaded
before the products of the current ones, so that they arrive during these. If two tiles fit into workgroup
memory, there is one barrier for 32 inputs, otherwise two. As in matvec the norm's rstd comes at the end: a
thread fills parts of the same rows from first to last and sums their squares.

Float32 programs multiply and add in float32. In float16 programs both factors are float16 in workgroup
memory, and these values are rounded:
- Rows, scaled by a power of two for each eight inputs (see scaled), are rounded to 11 bits: any finite input
  works. In float32 rows, groups of eight in which few inputs dwarf the others are multiplied unrounded
  (add_lopsided).
- Products of codes are exact: eight of them are added in float16, each sum rounded to 11 bits. All else is
  float32: sums of the groups of eight, scale and bias, and the sum of the unrounded inputs that bias needs.
- Weights without codes are rounded to float16, and multiplied and added in float32.
Compared with float64 a row of outputs is off by 5e-4 to 7e-4 (root mean squares), and by 8e-4 if two of its
inputs are a thousand times as large; rounding the rows is 2e-4 to 4e-4 of that, and the whole error with
weights without codes (tests/device/test_float16_products.py).

matmul_int8.py has packed int8 products, and cooperative.py cooperative matrices.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.classes import Tuning
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.linear.epilogue import VALUES, epilogue, sides
from nearfar.targets.gpu.kernels.linear.layout import params
from nearfar.targets.gpu.kernels.linear.scaled import (
    CHAIN,
    centred,
    exponent_of,
    factor_of,
    inverse_of,
    limit_of,
    lopsided,
    seldom,
    words_of,
)
from nearfar.targets.gpu.kernels.linear.tiled import Tiled
from nearfar.targets.gpu.kernels.script.scales import GroupScales
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import (
    WIDTH,
    Slices,
    at,
    clear,
    f32x4,
    of_numbers,
    or_zero,
    quarter,
    scale_buffer,
    spread,
    total,
    word_buffer,
)

TILE_K = 32
CHUNKS = TILE_K // CHAIN  # chunks of a row in a tile
VECTORS = CHAIN // WIDTH  # vectors in a chunk
SIZES = {"float32": 4, "float16": 2}


@dataclass(frozen=True)
class MatmulTiling(Tiled):
    """A tiling with numbers of `dtype`, with `copies` tiles in workgroup memory.

    A thread fills `pieces` chunks of rows and `made` inputs of four columns. `scaled`: rows are float16, with
    a power of two for each chunk. `coded`: weights are codes, with `groups` groups in a tile, and products
    are float16. `biased`: the codes have biases, which need the sums of inputs.
    """

    dtype: str
    scaled: bool
    coded: bool
    biased: bool
    groups: int
    memory: int

    @property
    def pieces(self) -> int:
        """The number of chunks of rows that a thread loads."""
        return self.rows * CHUNKS // self.threads

    @property
    def made(self) -> int:
        """The number of successive inputs for which a thread makes the weights of four columns."""
        return TILE_K * self.columns // WIDTH // self.threads

    @property
    def size(self) -> int:
        """Bytes of a tile: rows and weights, a power of two and a sum for each chunk, scales and biases."""
        numbers = TILE_K * (self.rows + self.columns) * SIZES[self.dtype]
        of_rows = self.rows * CHUNKS * 4 * (self.scaled + self.biased)
        return numbers + of_rows + self.groups * self.columns * 4 * (self.coded + self.biased)

    @property
    def copies(self) -> int:
        """The number of tiles that fit into `memory` bytes of a workgroup, at most two."""
        return 2 if 2 * self.size <= self.memory else 1


def tiling(job: Linear, tuning: Tuning) -> MatmulTiling:
    """The class's tile, with fewer rows for jobs with fewer rows, and narrower if float32 numbers
    do not fit.
    """
    (most, columns), device = tuning.device.tile, tuning.device
    dtype = "float16" if tuning.half else "float32"
    if TILE_K * (most + columns) * SIZES[dtype] > device.shared_bytes:
        columns //= 2
    laid = Tiled.over(job, device, columns)
    coded = tuning.half and job.matrix.quantized
    groups = max(TILE_K // job.matrix.group, 1) if coded else 1
    memory = (tuning.half and device.staged_bytes) or device.shared_bytes
    kinds = tuning.half, coded, coded and job.matrix.scales.offsets
    return MatmulTiling(laid.rows, columns, laid.lanes, laid.deep, dtype, *kinds, groups, memory)


def matmul(job: Linear, tuning: Tuning) -> tirx.PrimFunc:
    """The launch of `job` for many rows; rows and columns are whole vectors (vectors.fits)."""
    m, k, matrix = job.m, job.matrix.k, job.matrix
    has_norm, eps, quantized = job.norm is not None, job.norm or 0.0, matrix.quantized
    plan, each = tiling(job, tuning), sides(job)
    lanes, threads, own, made, copies = plan.lanes, plan.threads, plan.own, plan.made, plan.copies
    scaled, coded, biased, pieces, groups = plan.scaled, plan.coded, plan.biased, plan.pieces, plan.groups
    slices, group_scales, limit = Slices.of(matrix, made), GroupScales(matrix), limit_of(matrix.value_bits)
    across, wide, tiles = job.columns // WIDTH, plan.columns // WIDTH, ceil_div(k, TILE_K)
    ragged_m, ragged_n, ragged_k = m % plan.rows != 0, across % lanes != 0, k % TILE_K != 0
    (words_shape, word_dtype), scales_in = word_buffer(matrix), scale_buffer(matrix)
    vector, product = f"{plan.dtype}x{WIDTH}", f"{'float16' if coded else 'float32'}x{WIDTH}"
    chunks, w_size = plan.rows * CHUNKS, TILE_K * wide
    middle = float(1 << (matrix.bits - 1))
    precise = scaled and job.x_dtype == "float32"
    # Small tiles have separate memory for squares, which saves a barrier.
    apart = has_norm and scaled

    def shared_if(used, count, dtype):
        """Declare workgroup memory, or, if it is not used, a local of one element."""
        return T.alloc_buffer((count if used else 1,), dtype, scope="shared" if used else "local")

    # These write statements into the kernel below, unrolled.

    def load_tile(word, scale, xs, w0, w1, x, row, tile, column, first, thread):
        """Load a thread's share of a tile into registers; past k the last inputs are loaded again."""
        start = start_of(tile, first)
        slices.bring(word, w0, start, column, ragged_k and not quantized)
        if quantized:
            group_scales.load(scale, 0, w1, start // matrix.group, column)
        for j in range(pieces):
            for v in range(VECTORS):
                T.buffer_store(xs, x[row[j], inside(vector_of(tile, thread, v))], [j * VECTORS + v])

    def start_of(tile, first):
        """The first input that a thread loads."""
        start = tile * TILE_K + first
        return T.min(start, k - made) if ragged_k and quantized else start

    def vector_of(tile, thread, v):
        """The index in a row of the `v`th vector of the thread's chunk."""
        return (tile * CHUNKS + thread % CHUNKS) * VECTORS + v

    def inside(index):
        return T.min(index, k // WIDTH - 1) if ragged_k else index

    def store_weights(wt, held, word, scale, tile, first, thread, copy):
        """Write a thread's weights or codes to workgroup memory."""
        if quantized:
            group_scales.convert(scale, 0, start_of(tile, first) // matrix.group)
        if coded and matrix.scales.table is None:
            values = centred(held, matrix, made, word, first)
        elif coded:
            values = ((e, slices.weight(word, first, e)) for e in range(made))
        else:
            weights = (slices.weight(word, first, e) for e in range(made))
            values = ((e, group_scales.weight(scale, 0, weight)) for e, weight in enumerate(weights))
        for e, value in values:
            place = copy * w_size + (first + e) * wide + thread % wide
            T.buffer_store(wt, T.Cast(vector, value), [place])

    def store_scales(scales, biases, scale, first, thread, copy):
        """Write scale and bias of a group's codes minus their middle, in float32."""
        place = (copy * groups + first // (TILE_K // groups)) * wide + thread % wide
        factors = group_scales.scale(scale, 0)
        T.buffer_store(scales, factors, [place])
        if biased:
            T.buffer_store(biases, group_scales.bias(scale, 0) + factors * spread(T.float32(middle)), [place])

    def store_rows(xt, factors, sums, square, squares, xs, value, bits, exponent, norm, tile, thread, copy):
        """Write a thread's rows, times the norm's weights, to workgroup memory; f16 programs scale each
        chunk.
        """
        for j in range(pieces):
            place = copy * chunks + j * threads + thread
            held, at_square = (squares, j * threads + thread) if apart else (square, j)
            for v in range(VECTORS):
                index = vector_of(tile, thread, v)
                made = f32x4(xs[j * VECTORS + v])
                T.buffer_store(value, or_zero(index * WIDTH < k, made) if ragged_k else made, [v])
                if has_norm:
                    T.buffer_store(value, value[v] * value[v], [VECTORS])
                    T.buffer_store(held, held[at_square] + total(value[VECTORS]), [at_square])
                    T.buffer_store(value, value[v] * norm[inside(index)], [v])
            inputs = [value[v] for v in range(VECTORS)]
            if biased:
                T.buffer_store(value, inputs[0] + inputs[1], [VECTORS])
                T.buffer_store(sums, total(value[VECTORS]), [place])
            if scaled:
                T.buffer_store(exponent, exponent_of(bits, inputs), [0])
                factor = inverse_of(exponent[0], limit)
                if precise:
                    factor = T.Select(lopsided(bits, exponent[0], inputs), -factor, factor)
                T.buffer_store(factors, factor, [place])
                inputs = [T.Cast(vector, each * spread(factor_of(exponent[0], limit))) for each in inputs]
            for v in range(VECTORS):
                T.buffer_store(xt, inputs[v], [place * VECTORS + v])

    def add_chunk(acc, chain, xs, weight, xt, wt, copy, chunk, tx, ty):
        """Add the products of eight inputs, a thread's rows by its columns, in one chain."""
        for e in range(CHAIN):
            for r in range(own if e % WIDTH == 0 else 0):
                value = xt[chunk_of(copy, r, ty, chunk) * VECTORS + e // WIDTH]
                T.buffer_store(xs, T.Cast(product, value), [r])
            for side in range(each):
                value = wt[weight_of(copy, chunk, e, side, tx)]
                T.buffer_store(weight, T.Cast(product, value), [side])
            for r in range(own):
                for side in range(each):
                    place, added = r * each + side, weight[side] * spread(at(xs[r], e % WIDTH))
                    if scaled:
                        T.buffer_store(chain, added if e == 0 else chain[place] + added, [place])
                    else:
                        T.buffer_store(acc, acc[place] + added, [place])

    def add_scaled(acc, chain, scales, factors, copy, chunk, tx, ty):
        """Add the chains of eight inputs, multiplied by their chunks' divisors."""
        for side in range(each):
            for r in range(own):
                factor = factors[chunk_of(copy, r, ty, chunk)]
                factor = spread(T.max(factor, T.float32(0)) if precise else factor)
                factor = scaling(scales, factor, copy, chunk, side, tx)
                add(acc, r, side, f32x4(chain[r * each + side]) * factor)

    def add_lopsided(acc, eight, factors, scales, wt, x, logit_rows, norm, tile, copy, chunk, tx, by, ty):
        """Add the products of rows with lopsided chunks, from the unscaled rows."""
        for r in range(own):
            with T.If(factors[chunk_of(copy, r, ty, chunk)] < 0), T.Then(), seldom():
                row = T.min(row_of(by, r, ty), m - 1) if ragged_m else row_of(by, r, ty)
                row = logit_rows[row] if job.rows else row
                # other indices than in the loop above, so that no value stays in a register
                with T.serial(VECTORS) as v:
                    index = (tile * CHUNKS + chunk) * VECTORS + v
                    value = f32x4(x[row, inside(index)])
                    value = value * norm[inside(index)] if has_norm else value
                    T.buffer_store(eight, or_zero(index * WIDTH < k, value) if ragged_k else value, [0])
                    for side in range(each):
                        products = [
                            f32x4(wt[weight_of(copy, chunk, v * WIDTH + e, side, tx)])
                            * spread(at(eight[0], e))
                            for e in range(WIDTH)
                        ]
                        made = (products[0] + products[1]) + (products[2] + products[3])
                        add(acc, r, side, scaling(scales, made, copy, chunk, side, tx))

    def add(acc, r, side, value):
        T.buffer_store(acc, acc[r * each + side] + value, [r * each + side])

    def scaling(scales, value, copy, chunk, side, tx):
        """`value` times the scale of the codes of a chunk, if weights are codes."""
        return scales[scale_of(copy, chunk // (CHUNKS // groups), side, tx)] * value if coded else value

    def add_biases(acc, biases, sums, copy, tx, ty):
        """Add the biases times the sums of a tile's inputs."""
        for group in range(groups):
            for side in range(each):
                for r in range(own):
                    first, *rest = (
                        sums[chunk_of(copy, r, ty, group * (CHUNKS // groups) + i)]
                        for i in range(CHUNKS // groups)
                    )
                    added = biases[scale_of(copy, group, side, tx)] * spread(sum(rest, first))
                    T.buffer_store(acc, acc[r * each + side] + added, [r * each + side])

    def weight_of(copy, chunk, e, side, tx):
        return copy * w_size + (chunk * CHAIN + e) * wide + side * lanes + tx

    def chunk_of(copy, r, ty, chunk):
        return copy * chunks + (r * plan.deep + ty) * CHUNKS + chunk

    def scale_of(copy, group, side, tx):
        return (copy * groups + group) * wide + side * lanes + tx

    def row_of(by, r, ty):
        return by * plan.rows + r * plan.deep + ty

    @prim_func
    def kernel(
        x: T.Buffer((job.x_rows or m, k // WIDTH), f"{job.x_dtype}x{WIDTH}"),
        logit_rows: T.Buffer((MAX_ROWS,), "int32"),
        norm: T.Buffer((k // WIDTH,), f"float32x{WIDTH}"),
        w0: T.Buffer(words_shape, word_dtype),
        w1: T.Buffer(*scales_in),
        bias: T.Buffer(quarter((job.of or matrix.n,)), f"float32x{WIDTH}"),
        residual: T.Buffer(quarter((m, job.width)), f"{job.out_dtype}x{WIDTH}"),
        out: T.Buffer(quarter(job.out[0]), f"{job.out_dtype}x{WIDTH}"),
    ):
        for bx in T.thread_binding(ceil_div(across, lanes), thread="blockIdx.x"):
            for by in T.thread_binding(ceil_div(m, plan.rows), thread="blockIdx.y"):
                for ty in T.thread_binding(plan.deep, thread="threadIdx.y"):
                    for tx in T.thread_binding(lanes, thread="threadIdx.x"):
                        xt = T.alloc_shared((copies * chunks * VECTORS,), vector)
                        wt = T.alloc_shared((copies * w_size,), vector)
                        factors = shared_if(scaled, copies * chunks, "float32")
                        sums = shared_if(biased, copies * chunks, "float32")
                        scales = shared_if(coded, copies * groups * wide, "float32x4")
                        biases = shared_if(biased, copies * groups * wide, "float32x4")
                        squares = shared_if(apart, chunks, "float32")
                        acc = T.alloc_local((own * each,), "float32x4")
                        chain = T.alloc_local((own * each,), product)
                        square = T.alloc_local((pieces,), "float32")
                        fill = T.alloc_local((pieces * VECTORS,), f"{job.x_dtype}x{WIDTH}")
                        eight = T.alloc_local((VECTORS + 1,), "float32x4")
                        held = T.alloc_local((words_of(matrix),), "uint32x4")
                        bits = T.alloc_local((1,), "uint32x4")
                        exponent = T.alloc_local((1,), "uint32")
                        xs = T.alloc_local((own,), product)
                        weight = T.alloc_local((each,), product)
                        word = T.alloc_local((slices.words,), word_dtype)
                        scale = T.meta_var(group_scales.declare())
                        row = T.alloc_local((pieces,), "int32")
                        value = T.alloc_local((VALUES,), "float32")
                        rstd = T.alloc_local((1,), "float32")
                        thread: T.let = ty * lanes + tx
                        first: T.let = thread // wide * made
                        brought: T.let = bx * lanes + thread % wide % lanes
                        column: T.let = (T.min(brought, across - 1) if ragged_n else brought) + (
                            thread % wide // lanes * across
                        )
                        for j in T.unroll(pieces):
                            row[j] = by * plan.rows + (j * threads + thread) // CHUNKS
                            if ragged_m:
                                row[j] = T.min(row[j], m - 1)
                            if job.rows:
                                row[j] = logit_rows[row[j]]
                            square[j] = T.float32(0)
                            if apart:
                                squares[j * threads + thread] = T.float32(0)
                        clear(acc, own * each)
                        load_tile(word, scale, fill, w0, w1, x, row, 0, column, first, thread)
                        for tile in T.serial(tiles):
                            copy: T.let = tile % copies
                            store_weights(wt, held, word, scale, tile, first, thread, copy)
                            if coded and first % (TILE_K // groups) == 0:
                                store_scales(scales, biases, scale, first, thread, copy)
                            store_rows(
                                xt, factors, sums, square, squares, fill, eight, bits, exponent, norm, tile,
                                thread, copy,
                            )  # fmt: skip
                            T.tvm_storage_sync("shared")
                            following: T.let = T.min(tile + 1, tiles - 1)
                            load_tile(word, scale, fill, w0, w1, x, row, following, column, first, thread)
                            for chunk in T.serial(CHUNKS):
                                add_chunk(acc, chain, xs, weight, xt, wt, copy, chunk, tx, ty)
                                if scaled:
                                    add_scaled(acc, chain, scales, factors, copy, chunk, tx, ty)
                                if precise:
                                    add_lopsided(
                                        acc, eight, factors, scales, wt, x, logit_rows, norm, tile, copy,
                                        chunk, tx, by, ty,
                                    )  # fmt: skip
                            if biased:
                                add_biases(acc, biases, sums, copy, tx, ty)
                            if copies == 1:
                                T.tvm_storage_sync("shared")
                        if has_norm and not apart:
                            if copies == 2:  # other threads may still read the tile before this one
                                T.tvm_storage_sync("shared")
                            for j in T.unroll(pieces):
                                xt[j * threads + thread] = spread(square[j])
                            T.tvm_storage_sync("shared")
                        for r in T.unroll(own):
                            if (not ragged_m or row_of(by, r, ty) < m) and (
                                not ragged_n or bx * lanes + tx < across
                            ):
                                if has_norm:
                                    rstd[0] = T.float32(0)
                                    # These indices differ from those of the loop above, because values of
                                    # shared indices would stay in registers.
                                    for v in T.serial(CHUNKS):
                                        rstd[0] = rstd[0] + (
                                            squares[chunk_of(0, r, ty, v)]
                                            if apart
                                            else at(xt[chunk_of(0, r, ty, v)], 0)
                                        )
                                    rstd[0] = T.rsqrt(rstd[0] * T.float32(1.0 / k) + T.float32(eps))
                                    for side in T.unroll(each):
                                        acc[r * each + side] = acc[r * each + side] * spread(rstd[0])
                                epilogue(
                                    job, value, [acc[r * each + side] for side in range(each)], bias,
                                    residual, out, row_of(by, r, ty), bx * lanes + tx,
                                )  # fmt: skip

    return of_numbers(select(kernel, params(job), "matmul"))
