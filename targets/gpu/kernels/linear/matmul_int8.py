"""Matrix times many rows (prefill) by packed dot products of signed bytes: four products in an instruction.

Rows are bytes with a scale for every 32 inputs (rounded.py); a code of the matrix fits a byte already. So

    y = Σ over 32 inputs: scale_w · scale_x · (codes · bytes) + bias_w · scale_x · Σ bytes,

where the products of codes and bytes are exact integers, and the bias is multiplied by the sum of the rounded
inputs. One mask makes a word of four codes that are `apart` inputs apart (two for q4), and the rows' words
are made of the same inputs. Values of a table then take the place of their codes. Codes of 8 bits have their
sign bit inverted, so 128 times the sum is added. Without biases the bias is -zero times the scale: codes of 8
bits then need no sum.

For 64 inputs at a time all threads of a workgroup bring a tile of rows and of the matrix into workgroup
memory, and load the next one while they multiply: a thread adds integers of 32 inputs for four rows by four
columns, and then scales them.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.classes import DeviceClass
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.linear.epilogue import VALUES, epilogue, sides
from nearfar.targets.gpu.kernels.linear.layout import params
from nearfar.targets.gpu.kernels.linear.lookup import Lookup
from nearfar.targets.gpu.kernels.linear.rounded import (
    BYTES,
    INPUTS,
    TILE_K,
    codes_shape,
    rounded,
    scales_shape,
)
from nearfar.targets.gpu.kernels.linear.tiled import Tiled
from nearfar.targets.gpu.kernels.script.scales import GroupRegisters, GroupScales
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import (
    WIDTH,
    at,
    clear,
    f32x4,
    joined,
    of_numbers,
    quarter,
    scale_buffer,
    spread,
    word_buffer,
)
from nearfar.targets.gpu.packing import PLANES, SIGN_BIT

DOT = "dot4I8Packed"
BLOCKS = TILE_K // INPUTS
QUADS = INPUTS // BYTES  # words of a block


def int8_products(matrix: Matrix) -> bool:
    """Whether int8 products are possible: codes must be in one plane, so that they can become bytes of a
    word.
    """
    return matrix.quantized and len(PLANES[matrix.bits]) == 1 and matrix.group % INPUTS == 0


def matmul_int8(job: Linear, device: DeviceClass) -> Staged:
    """The launches of a job: one rounds the rows to bytes, one multiplies."""
    product = ["scratch:0", "scratch:1", *_others(job)]
    rows = ["x", *["norm"] * (job.norm is not None), "scratch:0", "scratch:1"]
    stages = (
        Stage(rounded(job, 8 // job.matrix.bits), tuple(rows)),
        Stage(_product(job, Tiled.over(job, device, device.tile[1])), tuple(product)),
    )
    return Staged(stages, ((codes_shape(job), "uint32"), (scales_shape(job), "float32")))


def _product(job: Linear, plan: Tiled) -> tirx.PrimFunc:
    m, k, matrix, each = job.m, job.matrix.k, job.matrix, sides(job)
    bits = matrix.bits
    lanes, threads, own, deep = plan.lanes, plan.threads, plan.own, plan.deep
    across, wide, tiles = job.columns // WIDTH, plan.columns // WIDTH, ceil_div(k, TILE_K)
    ragged_m, ragged_n = m % plan.rows != 0, across % lanes != 0
    (words_shape, _), (scales_in, scale_dtype) = word_buffer(matrix), scale_buffer(matrix)
    biased, centre = matrix.scales.offsets, (128 if bits == 8 else 0) - matrix.zero
    apart, groups = 8 // bits, max(TILE_K // matrix.group, 1)
    vectors = TILE_K // BYTES // WIDTH  # vectors of a row's words in a tile
    # The vectors of each array in a tile, and the number that a thread loads.
    x_size, w_size, s_size = plan.rows * vectors, TILE_K * bits // 32 * wide, groups * wide
    x_fills, w_fills, s_fills, r_fills = (ceil_div(n, threads) for n in (x_size, w_size, s_size, plan.rows))

    # Integer scales are in workgroup memory as numbers, others as they were loaded.
    group_scales, lookup = GroupScales(matrix, s_fills), Lookup(matrix, "uint32")
    s_each, s_dtype = (matrix.scales.values, f"float32x{WIDTH}") if group_scales.levels else (1, scale_dtype)

    # These write statements into the kernel below, unrolled.

    def fill(size, fills, thread, write):
        """Write `size` vectors, each by the thread whose turn it is: calls write(turn, vector)."""
        for j in range(fills):
            if (j + 1) * threads <= size:
                write(j, j * threads + thread)
                continue
            with T.If(j * threads + thread < size), T.Then():
                write(j, j * threads + thread)

    def column_of(place, bx):
        """The index of a vector of columns of the matrix; past the last one, the last."""
        brought = bx * lanes + place % lanes
        return (T.min(brought, across - 1) if ragged_n else brought) + place // lanes * across

    def row_at(place, by):
        row = by * plan.rows + place
        return T.min(row, m - 1) if ragged_m else row

    def group_of(tile, index):
        """The group of a tile's `index`th vector of scales."""
        row = tile * TILE_K // matrix.group + index // wide
        return T.min(row, k // matrix.group - 1) if k % TILE_K else row

    def load_tile(held, x, scales, w0, w1, tile, thread, bx, by):
        """Load a thread's share of a tile into registers; rows past k are 0, so codes there do not matter."""
        xs, words, scale, factors = held
        last = k * bits // 32 - 1

        def word(j, index):
            row = tile * (TILE_K * bits // 32) + index // wide
            row = T.min(row, last) if k % TILE_K else row
            T.buffer_store(words, w0[row, column_of(index % wide, bx)], [j])

        def group(j, index):
            group_scales.load(scale, j, w1, group_of(tile, index), column_of(index % wide, bx))

        def inputs(j, index):
            value = x[row_at(index // vectors, by), tile * vectors + index % vectors]
            T.buffer_store(xs, value, [j])

        fill(x_size, x_fills, thread, inputs)
        fill(w_size, w_fills, thread, word)
        fill(s_size, s_fills, thread, group)
        fill(
            plan.rows, r_fills, thread,
            lambda j, index: T.buffer_store(factors, scales[row_at(index, by), tile], [j]),
        )  # fmt: skip

    def store_tile(held, tiled, tile, thread):
        """Write a thread's words to workgroup memory, each vector of them as `apart` vectors of
        four codes.
        """
        xs, words, scale, factors = held
        xt, wt, st, rt = tiled
        sign = int(SIGN_BIT) ^ (0x80808080 if bits == 8 else 0)

        def codes(j, index):
            first = index // wide * apart
            for part in range(apart):
                value = words[j] ^ _bits(sign)
                if apart > 1:
                    value = T.shift_right(value, _bits(part * bits)) & _bits(0x01010101 * ((1 << bits) - 1))
                if lookup.table:
                    value = values_of(lookup, value)
                T.buffer_store(wt, value, [(first + part) * wide + index % wide])

        def of_groups(j, index):
            group_scales.convert(scale, j, group_of(tile, index))
            array = scale.numbers if group_scales.levels else scale.words
            for value in range(s_each):
                T.buffer_store(st, array[j * s_each + value], [index * s_each + value])

        def numbers(j, index):
            for place in range(WIDTH):
                T.buffer_store(rt, at(factors[j], place), [index * WIDTH + place])

        fill(x_size, x_fills, thread, lambda j, index: T.buffer_store(xt, xs[j], [index]))
        fill(w_size, w_fills, thread, codes)
        fill(s_size, s_fills, thread, of_groups)
        fill(plan.rows, r_fills, thread, numbers)

    def add_vector(whole, rows, xt, wt, block, vector, tx, ty):
        """Add the products of 16 inputs: a thread's rows by its columns."""
        for r in range(own):
            place = (r * deep + ty) * vectors + block * (vectors // BLOCKS) + vector
            T.buffer_store(rows, xt[place], [r])
        for quad in range(WIDTH):
            for side in range(each):
                place = (block * QUADS + vector * WIDTH + quad) * wide + side * lanes + tx
                words = wt[place]
                for r in range(own):
                    to = r * each + side
                    dots = [_dot(at(rows[r], quad), at(words, column)) for column in range(WIDTH)]
                    T.buffer_store(whole, whole[to] + joined(dots), [to])

    def scale_block(acc, whole, st, rt, block, tx, ty):
        """Scale the integers of 32 inputs, and add them to the sums."""
        for side in range(each):
            of_group = block * INPUTS // matrix.group if groups > 1 else 0
            held, place = GroupRegisters(st, st), of_group * wide + side * lanes + tx
            scale = group_scales.scale(held, place)
            bias = group_scales.bias(held, place) if biased else None
            if centre:
                added = scale * spread(T.float32(centre))
                bias = bias + added if biased else added
            for r in range(own):
                to, place = r * each + side, (r * deep + ty) * WIDTH + block * (WIDTH // BLOCKS)
                value = f32x4(whole[to]) * (scale * spread(rt[place]))
                if bias is not None:
                    value = value + bias * spread(rt[place + 1])
                T.buffer_store(acc, acc[to] + value, [to])

    @prim_func
    def kernel(
        x: T.Buffer((m, tiles * vectors), "uint32x4"),
        scales: T.Buffer((m, tiles), "float32x4"),
        w0: T.Buffer(words_shape, "uint32x4"),
        w1: T.Buffer(scales_in, scale_dtype),
        bias: T.Buffer(quarter((job.of or matrix.n,)), "float32x4"),
        residual: T.Buffer(quarter((m, job.width)), f"{job.out_dtype}x{WIDTH}"),
        out: T.Buffer(quarter(job.out[0]), f"{job.out_dtype}x{WIDTH}"),
    ):
        for bx in T.thread_binding(ceil_div(across, lanes), thread="blockIdx.x"):
            for by in T.thread_binding(ceil_div(m, plan.rows), thread="blockIdx.y"):
                for ty in T.thread_binding(deep, thread="threadIdx.y"):
                    for tx in T.thread_binding(lanes, thread="threadIdx.x"):
                        xt = T.alloc_shared((x_size,), "uint32x4")
                        wt = T.alloc_shared((TILE_K // BYTES * wide,), "uint32x4")
                        st = T.alloc_shared((s_size * s_each,), s_dtype)
                        rt = T.alloc_shared((plan.rows * WIDTH,), "float32")
                        xs = T.alloc_local((x_fills,), "uint32x4")
                        words = T.alloc_local((w_fills,), "uint32x4")
                        scale = T.meta_var(group_scales.declare())
                        factors = T.alloc_local((r_fills,), "float32x4")
                        acc = T.alloc_local((own * each,), "float32x4")
                        whole = T.alloc_local((own * each,), "int32x4")
                        rows = T.alloc_local((own,), "uint32x4")
                        value = T.alloc_local((VALUES,), "float32")
                        lookup.declare()
                        thread: T.let = ty * lanes + tx
                        lookup.fill(thread, threads)
                        clear(acc, own * each)
                        load_tile((xs, words, scale, factors), x, scales, w0, w1, 0, thread, bx, by)
                        for tile in T.serial(tiles):
                            store_tile((xs, words, scale, factors), (xt, wt, st, rt), tile, thread)
                            T.tvm_storage_sync("shared")
                            following: T.let = T.min(tile + 1, tiles - 1)
                            load_tile(
                                (xs, words, scale, factors), x, scales, w0, w1, following, thread, bx, by
                            )
                            for block in T.serial(BLOCKS):
                                for i in T.unroll(own * each):
                                    whole[i] = spread(T.int32(0))
                                for vector in T.serial(vectors // BLOCKS):
                                    add_vector(whole, rows, xt, wt, block, vector, tx, ty)
                                scale_block(acc, whole, st, rt, block, tx, ty)
                            T.tvm_storage_sync("shared")
                        for r in T.unroll(own):
                            if (not ragged_m or by * plan.rows + r * deep + ty < m) and (
                                not ragged_n or bx * lanes + tx < across
                            ):
                                epilogue(
                                    job, value, [acc[r * each + side] for side in range(each)], bias,
                                    residual, out, by * plan.rows + r * deep + ty, bx * lanes + tx,
                                )  # fmt: skip

    return of_numbers(select(kernel, ["x", "scales", *_others(job)], "matmul_int8"))


def _others(job: Linear) -> list[str]:
    """The names of parameters other than the rows and their norm."""
    return [name for name in params(job) if name not in ("x", "norm")]


def values_of(lookup: Lookup, codes):
    """The values of four codes in the bytes of each word, as bytes."""
    codes, made = T.Bind(codes), None
    for shift in range(0, 8 * BYTES, 8):
        value = lookup.of(T.shift_right(codes, _bits(shift)) & _bits(0xFF))
        made = value if made is None else T.Bind(made | T.shift_left(value, _bits(shift)))
    return made


def _dot(a, b):
    return T.call_pure_extern("int32", DOT, a, b)


def _bits(word: int):
    return spread(T.uint32(int(word)))
