"""The products of an expert's two matrices with the rows that chose it, tile by tile."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.kernels.jobs import Experts
from nearfar.kernels.pieces import MatrixPiece
from nearfar.targets.gpu.kernels.activations import activated, sigmoid_product
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.experts.column import THREADS, Column
from nearfar.targets.gpu.kernels.experts.tiles import Tiles
from nearfar.targets.gpu.kernels.script.text import prim_func


def gated(job: Experts, gate, up):
    """The hidden value of a gate and an up, or of the gate alone where experts have no other."""
    if not job.gated:
        return activated(job.activation, gate)
    if job.clamp is None:
        return activated(job.activation, gate) * up
    slope, most = map(T.float32, job.clamp)
    gate, up = T.min(gate, most), T.max(T.min(up, most), -most)
    return sigmoid_product(gate, slope * gate) * (up + T.float32(1))


def hidden(tiles: Tiles, piece: MatrixPiece):
    """Hidden value `column` of each pair of a tile whose expert is in the piece."""
    job = tiles.job
    return _products(
        tiles, piece, job.m, 1 + job.gated, job.top, job.gate_up_bias,
        lambda values: gated(job, values[0], values[-1]), "experts_hidden",
    )  # fmt: skip


def outputs(tiles: Tiles, piece: MatrixPiece):
    """Output `column` of each pair of a tile whose expert is in the piece, without its weight."""
    job = tiles.job
    return _products(
        tiles, piece, tiles.pairs, 1, 1, job.down_bias, lambda values: values[0], "experts_outputs"
    )


def _products(tiles: Tiles, piece: MatrixPiece, m, halves, top, biased, finish, symbol):
    """The products of the pairs with a piece. A row of inputs belongs to `top` pairs; `finish` makes a value
    of the products of a pair with the `halves` of an expert's matrix.
    """
    column, rows, pairs = Column.of(piece.matrix), tiles.rows, tiles.pairs
    width = piece.matrix.each.n // halves
    of_all = width * halves * tiles.job.experts
    first = piece.first // piece.matrix.each.n
    last = first + piece.matrix.stack
    units, k = column.units, piece.matrix.k
    codes_shape, dtype, scales_shape = column.shapes
    chosen_shape, chosen_dtype = tiles.buffer
    words = ["w0", "w1"] if piece.matrix.quantized else ["w0"]
    names = ["x", "chosen", *words, *["bias"] * biased, "out"]

    def result(acc, bias, expert, at, i):
        values = [acc[half * rows + i] for half in range(halves)]
        if biased:
            values = [
                value + bias[(expert * halves + half) * width + at] for half, value in enumerate(values)
            ]
        return finish(values)

    @prim_func
    def kernel(
        x: T.Buffer((m, k), "float32"),
        chosen: T.Buffer(chosen_shape, chosen_dtype),
        w0: T.Buffer(codes_shape, dtype),
        w1: T.Buffer(scales_shape, "uint32"),
        bias: T.Buffer((of_all,), "float32"),
        out: T.Buffer((pairs, width), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(width, THREADS), thread="blockIdx.x"):
            for by in T.thread_binding(tiles.count, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    at = T.alloc_local((4,), "int32")  # column, expert, column of the piece, unit
                    row = T.alloc_local((rows,), "int32")
                    word = T.alloc_local((units.words,), dtype)
                    acc = T.alloc_local((halves * rows,), "float32")
                    scale = T.alloc_local((3,), "float32")  # scale, bias, a weight
                    at[0] = bx * THREADS + tx
                    at[1] = tiles.expert(chosen, by)
                    if at[0] < width and at[1] >= first and at[1] < last:
                        for i in T.unroll(rows):
                            row[i] = T.max(tiles.pair(chosen, by, i), 0) // top
                        for i in T.unroll(halves * rows):
                            acc[i] = T.float32(0)
                        for half in T.unroll(halves):
                            at[2] = ((at[1] - first) * halves + half) * width + at[0]
                            column.add(acc, half * rows, scale, word, at, x, row, w0, w1)
                        for i in T.unroll(rows):
                            if tiles.pair(chosen, by, i) >= 0:
                                out[tiles.pair(chosen, by, i), at[0]] = result(acc, bias, at[1], at[0], i)

    return select(kernel, names, symbol)
