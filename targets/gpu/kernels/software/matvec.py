"""Matrix times few rows (decode): speed depends on the instructions and bytes for each weight.

Threads are along the output rows, each with a few rows of its own, so that an input, once loaded, serves them
all; the matrix is stored k-major (see packing), so their loads coalesce. If that gives too few threads for a
GPU (long rows, few of them), threadIdx.y splits k and one barrier joins the parts. Scale and bias stay out of
the inner loop: a group adds scale * Σ q·x + bias * Σ x. The norm needs no pass of its own: rms_norm(x)·W =
rstd · ((x * weight)·W), so its sum of squares is computed on the way.
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
from nearfar.targets.gpu.classes import SHARED_BYTES
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

FEW_THREADS = 2048  # below this a GPU starves, so k is split when it is long
LONG_K = 2048


@dataclass(frozen=True)
class MatvecTiling:
    """`lanes` threads with `rows` rows each; `splits` of k in `groups` of `steps` steps of `chunk` inputs."""

    lanes: int
    rows: int
    splits: int
    groups: int
    steps: int
    chunk: int


def tiling(job: Linear) -> MatvecTiling:
    """The tiling. Nanoseconds of a core for a weight, by rows of a thread (SwiftShader, 576x576): 2: 5.6, 4:
    4.4, 8: 3.0.
    """
    matrix = job.matrix
    rows = 8 if job.m == 1 else 4
    lanes = lanes_for(job.columns, rows // 2 if job.gate else rows)
    parts = job.m * (rows + 1) * lanes * 4  # bytes of workgroup memory for the sums of one split
    wanted = 8 if matrix.k >= LONG_K and matrix.n // rows < FEW_THREADS else 1
    splits = next(
        count for count in (8, 4, 2, 1) if count <= wanted and (count == 1 or count * parts <= SHARED_BYTES)
    )
    if matrix.quantized:
        chunk = Units.of(matrix).inputs
        return MatvecTiling(lanes, rows, splits, matrix.k // matrix.group, matrix.group // chunk, chunk)
    words = ceil_div(matrix.k, 2) if matrix.bits == 16 else matrix.k
    fold = next(size for size in (4, 2, 1) if words % size == 0)
    steps = next(size for size in (8, 4, 2, 1) if words // fold % size == 0)
    return MatvecTiling(
        lanes, rows, splits, words // fold // steps, steps, fold * (2 if matrix.bits == 16 else 1)
    )


def tree_sum(products: list):
    """The sum of the products as a tree: in a chain each addition would wait for the one before."""
    while len(products) > 1:
        products = [a + b for a, b in zip(products[::2], products[1::2], strict=True)]
    return products[0]


def matvec(job: Linear, vectors: bool = False) -> tirx.PrimFunc:
    """The launch for small m. `vectors`: threads have neighbouring columns, where four words load at once."""
    m, k, bits = job.m, job.matrix.k, job.matrix.bits
    quantized, gated, has_norm, eps = (
        job.matrix.quantized,
        job.gate is not None,
        job.norm is not None,
        job.norm or 0.0,
    )
    plan = tiling(job)
    lanes, rows, splits, steps, chunk = plan.lanes, plan.rows, plan.splits, plan.steps, plan.chunk
    n_out = job.columns
    is_simple = not gated and job.softcap is None
    outs = rows // 2 if gated else rows  # output columns of a thread
    block = lanes * outs
    beside = neighbours(job, outs, vectors)
    each = ceil_div(plan.groups, splits)
    units = Units.of(job.matrix)
    placed = units.placed
    words = chunk // units.inputs * units.words  # words of a step
    words_shape, word_dtype = word_shape(job.matrix)
    ragged_n, ragged_k, ragged_groups = n_out % block != 0, k % chunk != 0, plan.groups % splits != 0
    values = m * rows

    def row_of(bx, tx, r):
        """Matrix row `r` of a thread; for a gated pair first the gate rows, then their up rows."""
        column = loaded_column(bx, tx, r % outs, lanes, outs, beside, n_out - 1 if ragged_n else None)
        return column + r // outs * n_out

    def x_value(x, start, at):
        """Input `at` of the row that starts there in the flat memory; zero beyond k (odd k of pairs)."""
        value = f32(x[0, start + (T.min(at, k - 1) if ragged_k else at)])
        return T.Select(at < k, value, T.float32(0)) if ragged_k else value

    def norm_at(at):
        return T.min(at, k - 1) if ragged_k else at

    def weight(word, e):
        """Weight or code `e` of a step; placed codes are multiplied by 2^(bits*e), and their inputs divided
        by it.
        """
        if not quantized:
            return dense_element(word[e // units.inputs], bits, e)
        return placed_code(word[0], bits, e) if placed else units.code(word, 0, e)

    def dotted(word, xs):
        """The sum of code * x over a step; a placed weight costs an and, a conversion, a multiplication and
        an addition.
        """
        return tree_sum([weight(word, e) * xs[e] for e in range(chunk)])

    def grouped(scale, offset, dot, top, xsum):
        """The sum of a group, from sums of codes times inputs, of the inputs of top codes, and of
        all inputs.
        """
        return scale * (dot + top if placed else dot) + offset * xsum

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
            for ty in T.thread_binding(splits, thread="threadIdx.y"):
                for tx in T.thread_binding(lanes, thread="threadIdx.x"):
                    part = T.alloc_shared(((values + m) * splits * lanes if splits > 1 else 1,), "float32")
                    acc = T.alloc_local((values + m,), "float32")  # sums, then sums of squares
                    dot = T.alloc_local((values,), "float32")
                    xs = T.alloc_local((m * chunk,), "float32")
                    xsum = T.alloc_local((m,), "float32")
                    top = T.alloc_local((m,), "float32")  # sums of the inputs that meet a word's top code
                    word = T.alloc_local((words,), word_dtype)
                    up = T.alloc_local((1,), "float32")
                    at = T.alloc_local((rows + m + 2,), "int32")  # the thread's rows, then x's rows
                    for r in T.unroll(rows):
                        at[r] = row_of(bx, tx, r)
                    for i in T.unroll(m):
                        at[rows + i] = (logit_rows[i] if job.rows else i) * k
                    for v in T.unroll(values + m):
                        acc[v] = T.float32(0)
                    for o in T.serial(each):
                        g: T.let = ty * each + o
                        if not ragged_groups or g < plan.groups:
                            for v in T.unroll(values):
                                dot[v] = T.float32(0)
                            for i in T.unroll(m):
                                xsum[i] = T.float32(0)
                                top[i] = T.float32(0)
                            for j in T.serial(steps):
                                at[rows + m] = (g * steps + j) * chunk
                                at[rows + m + 1] = (g * steps + j) * (words if not units.planes else 1)
                                for i in T.unroll(m):
                                    for e in T.unroll(chunk):
                                        if job.rows:
                                            xs[i * chunk + e] = x_value(x, at[rows + i], at[rows + m] + e)
                                        else:
                                            xs[i * chunk + e] = x_value(x, i * k, at[rows + m] + e)
                                        if has_norm:
                                            acc[values + i] = (
                                                acc[values + i] + xs[i * chunk + e] * xs[i * chunk + e]
                                            )
                                            xs[i * chunk + e] = (
                                                xs[i * chunk + e] * norm[norm_at(at[rows + m] + e)]
                                            )
                                        if quantized:
                                            xsum[i] = xsum[i] + xs[i * chunk + e]
                                        if placed:
                                            if e == chunk - 1:
                                                top[i] = top[i] + xs[i * chunk + e]
                                            xs[i * chunk + e] = xs[i * chunk + e] * place_factor(bits, e)
                                for r in T.unroll(rows):
                                    for v in T.unroll(words):
                                        word[v] = units.load(w0, at[rows + m + 1], v, at[r])
                                    if quantized and m == 1:
                                        dot[r] = dot[r] + dotted(word, xs)
                                    else:
                                        for e in T.unroll(chunk):
                                            up[0] = weight(word, e)
                                            for i in T.unroll(m):
                                                dot[i * rows + r] = (
                                                    dot[i * rows + r] + up[0] * xs[i * chunk + e]
                                                )
                            for i in T.unroll(m):
                                top[i] = top[i] * T.float32(top_code_offset(bits))
                            for r in T.unroll(rows):
                                if quantized:
                                    both = T.meta_var(scale_and_bias(job.matrix, w1, g, at[r]))
                                    scale: T.let = both[0]
                                    offset: T.let = both[1]
                                    for i in T.unroll(m):
                                        dot[i * rows + r] = grouped(
                                            scale, offset, dot[i * rows + r], top[i], xsum[i]
                                        )
                                for i in T.unroll(m):
                                    acc[i * rows + r] = acc[i * rows + r] + dot[i * rows + r]
                    if splits > 1:
                        for v in T.unroll(values + m):
                            part[(v * splits + ty) * lanes + tx] = acc[v]
                        T.tvm_storage_sync("shared")
                        for v in T.unroll(values + m):
                            acc[v] = T.float32(0)
                            for s in T.serial(splits):
                                acc[v] = acc[v] + part[(v * splits + s) * lanes + tx]
                    if ty == 0:
                        for i in T.unroll(m):
                            if has_norm:
                                acc[values + i] = T.rsqrt(
                                    acc[values + i] * T.float32(1.0 / k) + T.float32(eps)
                                )
                                for r in T.unroll(rows):
                                    acc[i * rows + r] = acc[i * rows + r] * acc[values + i]
                            for r in T.unroll(outs):
                                at[rows + m] = column_of(bx, tx, r, lanes, outs, beside)
                                if not ragged_n or at[rows + m] < n_out:
                                    dot[0] = simple(
                                        acc[i * rows + r], bias, residual, i, at[rows + m] + job.first
                                    )
                                    if gated:
                                        up[0] = acc[i * rows + outs + r]
                                        if job.bias:
                                            up[0] = up[0] + bias[n_out + at[rows + m]]
                                        dot[0] = activated(job.gate, dot[0]) * up[0]
                                    if job.softcap is not None:
                                        dot[0] = capped(dot[0], job.softcap)
                                    if job.residual and not is_simple:
                                        dot[0] = dot[0] + f32(residual[i, at[rows + m] + job.first])
                                    out[i, at[rows + m] + job.first] = stored(dot[0], job.out_dtype)

    return select(kernel, params(job), "matvec")
