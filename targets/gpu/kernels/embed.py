"""Rows of the embedding matrix, dequantized."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.targets.jobs import Linear
from nearfar.targets.kernels import Stage, Staged
from nearfar.targets.quantized import Matrix

from .common import ceil_div, high_half, low_half, select
from .layout import dense_element, params, place_factor, placed_code, scale_shape, top_code_offset, word_shape

THREADS = 64


def embed(m: int, matrix: Matrix) -> Staged:
    """A thread a word: 8 or 4 inputs of one row. Padding rows may hold any token id, so it is clamped."""
    job = Linear(m, matrix, "float32", "float32")
    words_shape, word_dtype = word_shape(job)
    per_word = 32 // matrix.bits
    words = words_shape[0]
    total = m * words
    ragged = matrix.k % per_word != 0
    group = max(matrix.group, 1)
    names = ["tokens", *params(job)[1:]]

    def code(word, e):
        value = placed_code(word, matrix.bits, e) * place_factor(matrix.bits, e)
        return value + T.Select(e == per_word - 1, T.float32(top_code_offset(matrix.bits)), T.float32(0))

    @T.prim_func(check_well_formed=False)
    def kernel(
        tokens: T.Buffer((256,), "int32"),
        w0: T.Buffer(words_shape, word_dtype),
        w1: T.Buffer(scale_shape(job), "uint32"),
        out: T.Buffer((m, matrix.k), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(total, THREADS), thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                at = T.alloc_local((3,), "int32")
                word = T.alloc_local((1,), word_dtype)
                scale = T.alloc_local((2,), "float32")
                at[0] = (bx * THREADS + tx) // words
                at[1] = (bx * THREADS + tx) % words
                if at[0] < m:
                    at[2] = T.max(T.min(tokens[at[0]], matrix.n - 1), 0)
                    word[0] = w0[at[1], at[2]]
                    if matrix.quantized:
                        sb: T.let = w1[at[1] * per_word // group, at[2]]
                        scale[0] = low_half(sb)
                        scale[1] = high_half(sb)
                    for e in T.unroll(per_word):
                        if not ragged or at[1] * per_word + e < matrix.k:
                            if matrix.quantized:
                                out[at[0], at[1] * per_word + e] = code(word[0], e) * scale[0] + scale[1]
                            else:
                                out[at[0], at[1] * per_word + e] = dense_element(word[0], matrix.bits, e)

    return Staged((Stage(select(kernel, names, "embed"), tuple(names)),))
