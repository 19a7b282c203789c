"""Rounds rows to signed bytes for integer products: of every 32 inputs the largest becomes 127.

A thread takes 32 inputs of a row, a workgroup 2,048; each sums the squares of the whole row if there is a
norm. (Another loop around the 32 keeps SwiftShader compiling for minutes.) This is a launch of its own,
because otherwise each of the product's n/64 workgroups along the columns would round the same rows again,
with one more barrier for the largest of 32.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.kernels.common import ceil_div, exactly, select
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import (
    WIDTH,
    at,
    f32x4,
    joined,
    of_numbers,
    spread,
    total,
    zero,
)

INPUTS = 32
"""Inputs that share a scale."""
TILE_K = 64
"""Inputs whose scales are stored together, and which the product takes at a time."""
BYTES = 4  # bytes of a word
LARGEST = 127
SMALLEST = 2.0**-126
"""The least scale: devices may take a smaller one for 0, and its inverse is infinite."""
THREADS = 64


def codes_shape(job: Linear) -> tuple[int, int]:
    """The shape of the rows' words, for whole tiles of inputs."""
    return job.m, ceil_div(job.matrix.k, TILE_K) * TILE_K // BYTES


def scales_shape(job: Linear) -> tuple[int, int]:
    """The shape of the scales: for every 32 inputs a scale, and the scale times the sum of their bytes."""
    return job.m, ceil_div(job.matrix.k, TILE_K) * TILE_K // INPUTS * 2


def rounded(job: Linear, apart: int) -> tirx.PrimFunc:
    """The kernel that rounds the rows of `job`, after its norm.

    A byte is the integer nearest to x/scale, with scale = max|x|/127. Bytes of a word are `apart` inputs
    apart, as are the codes in the matrix's words (see matmul_int8). Inputs past k are 0. If a number is not
    finite, neither is the sum.
    """
    m, k, eps, has_norm = job.m, job.matrix.k, job.norm or 0.0, job.norm is not None
    vectors, blocks, padded = k // WIDTH, k // INPUTS, ceil_div(k, TILE_K) * TILE_K // INPUTS
    each, span = INPUTS // WIDTH, BYTES * apart  # vectors of a block; inputs of `apart` words
    parts, vectors_each = ceil_div(padded, THREADS), INPUTS // BYTES // WIDTH

    # These write statements into the kernel below, unrolled.

    def load(xs, x, norm, row, block):
        """Load a block's inputs times the norm's weights, without the factor of the whole row."""
        for i in range(each):
            value = f32x4(x[row, block * each + i])
            T.buffer_store(xs, value * norm[block * each + i] if has_norm else value, [i])

    def largest(xs, found):
        T.buffer_store(found, T.float32(0), [0])
        for e in range(INPUTS):
            value = at(xs[e // WIDTH], e % WIDTH)
            T.buffer_store(found, T.max(found[0], T.max(value, -value)), [0])

    def store(codes, sums, xs, row, block):
        """Store the words of a block; `xs` are integers by now."""
        for i in range(vectors_each):
            words = []
            for word in range(i * WIDTH, (i + 1) * WIDTH):
                first = word // apart * span + word % apart
                places = [first + byte * apart for byte in range(BYTES)]
                words.append(_word([at(xs[place // WIDTH], place % WIDTH) for place in places]))
            T.buffer_store(codes, joined(words), [row, block * vectors_each + i])
        T.buffer_store(sums, zero(), [0])
        for i in range(each):
            T.buffer_store(sums, sums[0] + xs[i], [0])

    @prim_func
    def kernel(
        x: T.Buffer((m, vectors), f"{job.x_dtype}x{WIDTH}"),
        norm: T.Buffer((vectors,), f"float32x{WIDTH}"),
        codes: T.Buffer((m, padded * vectors_each), f"uint32x{WIDTH}"),
        scales: T.Buffer((m, padded * 2), "float32"),
    ):
        for row in T.thread_binding(m, thread="blockIdx.x"):
            for part in T.thread_binding(parts, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    partial = T.alloc_shared((THREADS,), "float32")
                    xs = T.alloc_local((each,), f"float32x{WIDTH}")
                    sums = T.alloc_local((1,), f"float32x{WIDTH}")
                    found = T.alloc_local((1,), "float32")
                    rstd = T.alloc_local((1,), "float32")
                    rstd[0] = T.float32(1)
                    if has_norm:
                        sums[0] = zero()
                        for turn in T.serial(ceil_div(vectors, THREADS)):
                            if turn * THREADS + tx < vectors:
                                value: T.let = f32x4(x[row, turn * THREADS + tx])
                                sums[0] = sums[0] + value * value
                        partial[tx] = total(sums[0])
                        T.tvm_storage_sync("shared")
                        rstd[0] = T.float32(0)
                        for i in T.serial(THREADS):
                            rstd[0] = rstd[0] + partial[i]
                        rstd[0] = T.rsqrt(rstd[0] * T.float32(1.0 / k) + T.float32(eps))
                    block: T.let = part * THREADS + tx
                    if block < blocks:
                        load(xs, x, norm, row, block)
                        largest(xs, found)
                        found[0] = found[0] * T.float32(1 / LARGEST)
                        for i in T.unroll(each):
                            xs[i] = rounded_vector(xs[i], found[0])
                        store(codes, sums, xs, row, block)
                        found[0] = found[0] * rstd[0]
                        scales[row, block * 2] = found[0]
                        scales[row, block * 2 + 1] = found[0] * total(sums[0])
                    if block == blocks and block < padded:
                        for i in T.unroll(vectors_each):
                            codes[row, block * vectors_each + i] = spread(T.uint32(0))
                        scales[row, block * 2] = T.float32(0)
                        scales[row, block * 2 + 1] = T.float32(0)

    names = ["x", *(["norm"] if has_norm else []), "codes", "scales"]
    return of_numbers(select(kernel, names, "rounded"))


def rounded_vector(vector, scale):
    """The integers nearest to four numbers divided by their scale; 0 if the inverse scale is not finite."""
    inverse = T.Select(scale >= exactly(SMALLEST), T.float32(1) / scale, T.float32(0))
    return joined([T.round(at(vector, place) * inverse) for place in range(WIDTH)])


def _word(numbers: list):
    """Four integers from -128 to 127 as the bytes of a word, the first lowest."""
    word = None
    for place, number in enumerate(numbers):
        byte = T.reinterpret("uint32", T.Cast("int32", number)) & T.uint32(0xFF)
        word = byte if word is None else word | T.shift_left(byte, T.uint32(8 * place))
    return word
