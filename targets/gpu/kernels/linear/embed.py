"""Looks up and dequantizes rows of the embedding matrix."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Embed
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.linear.layout import (
    Units,
    dense_element,
    params,
    scale_and_bias,
    scale_shape,
    word_shape,
)
from nearfar.targets.gpu.kernels.script.text import prim_func

THREADS = 64


def embed(job: Embed) -> Staged:
    """The launch of an Embed job, with a thread for each unit: 16, 8 or 4 inputs of one row. Padding rows may
    hold any token id, so ids are clamped.

    For a piece of a matrix, only threads whose token is in it write. Each piece has a launch of its own,
    since a matrix may have more pieces than a launch can bind.
    """
    m, matrix = job.m, job.matrix
    units = Units.of(matrix)
    words_shape, word_dtype = word_shape(matrix)
    inputs = units.inputs
    total = m * units.count
    ragged = matrix.k % inputs != 0
    group = max(matrix.group, 1)
    names = params(job)

    def value(word, scale, e):
        if not matrix.quantized:
            return dense_element(word[0], matrix.bits, e)
        if matrix.scales.offsets:
            return units.code(word, 0, e) * scale[0] + scale[1]
        # Codes are centred first: a product of 19 and 6 bits would be rounded before the sum.
        return (units.code(word, 0, e) - T.float32(matrix.zero)) * scale[0]

    def scaled(value):
        return value if job.scale == 1 else value * T.float32(job.scale)

    def inside(row):
        """Whether a row of the whole matrix is in this piece."""
        return T.And(job.first <= row, row < job.first + matrix.n)

    @prim_func
    def kernel(
        tokens: T.Buffer((MAX_STEP,), "int32"),
        w0: T.Buffer(words_shape, word_dtype),
        w1: T.Buffer(scale_shape(matrix), "uint32"),
        out: T.Buffer((m, matrix.k), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(total, THREADS), thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                at = T.alloc_local((3,), "int32")
                word = T.alloc_local((units.words,), word_dtype)
                scale = T.alloc_local((2,), "float32")
                at[0] = (bx * THREADS + tx) // units.count
                at[1] = (bx * THREADS + tx) % units.count
                if at[0] < m:
                    at[2] = T.max(T.min(tokens[at[0]], (job.of or matrix.n) - 1), 0)
                    if not job.of or inside(at[2]):
                        for v in T.unroll(units.words):
                            word[v] = units.load(w0, at[1], v, at[2] - job.first)
                        if matrix.quantized:
                            both = T.meta_var(
                                scale_and_bias(matrix, w1, at[1] * inputs // group, at[2] - job.first)
                            )
                            scale[0] = both[0]
                            scale[1] = both[1]
                        for e in T.unroll(inputs):
                            if not ragged or at[1] * inputs + e < matrix.k:
                                out[at[0], at[1] * inputs + e] = scaled(value(word, scale, e))

    return Staged((Stage(select(kernel, names, "embed"), tuple(names)),))
