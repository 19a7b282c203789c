"""The projections to q, k and v for few rows, fused with everything up to attention: bias, norms of heads,
rotation, and the append of k and v to the paged cache.

A lane owns whole pairs (i, i + head_dim/2) of a head: a vector of each half. If heads are normed, a workgroup
has a whole head, and its lanes add their sums of squares in workgroup memory; otherwise it has as many lanes
as read whole lines. Facts about rows come from `rows` (jobs.Rows), and small vectors from one tensor: so the
kernel has the eight buffers that every device allows. Heads that are stored differently (Matrix.pieces) have
a launch each, and no launch needs another's results.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.kv import BITS
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Project, Rows
from nearfar.kernels.pieces import MatrixPiece, placed
from nearfar.targets.gpu.classes import SOFTWARE, Tuning
from nearfar.targets.gpu.kernels.append.quantizer import Quantizer
from nearfar.targets.gpu.kernels.append.rows import PLACE, factor, turn
from nearfar.targets.gpu.kernels.attention.cached import Cached, PageWords
from nearfar.targets.gpu.kernels.attention.heads import HeadVectors
from nearfar.targets.gpu.kernels.common import select, stored
from nearfar.targets.gpu.kernels.linear.matvec import VECTOR_ROWS
from nearfar.targets.gpu.kernels.linear.sums import LANES, LaneColumns, Product, Sums, rows_of
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import (
    WIDTH,
    at,
    fits,
    joined,
    of_numbers,
    spread,
    total,
)
from nearfar.targets.gpu.packing import parts

PAIRS = 2 * WIDTH
"""Values of a head that a lane has: two vectors."""
MAX_THREADS = 256
"""The most threads of a workgroup that every device allows."""


def projects(job: Project, tuning: Tuning) -> bool:
    """Whether the target has kernels for the job. Norms over all heads would need the sums of all
    workgroups, so there is none for them.
    """
    paged = job.paged
    return (
        tuning.device is not SOFTWARE
        and job.m <= VECTOR_ROWS
        and fits(job.linear)
        and paged.head_dim % PAIRS == 0
        and not (paged.norm_eps is not None and paged.norm_all)
        and (paged.q_scale is None or paged.q_scale[1] == int(paged.q_scale[1]))
        and all(piece.first % paged.head_dim == 0 for piece in placed(job.linear.matrix))
    )


def project(job: Project, tuning: Tuning) -> Staged:
    """The launches of a Project job: one for each piece of the matrix."""
    launches, before = [], 0
    for piece in placed(job.linear.matrix):
        count = len(parts(piece.matrix))
        names = (*job.inputs(count), "out")
        func = of_numbers(select(_kernel(job, piece, tuning), list(names), "project"))
        given = {f"w{i}": f"w{before + i}" for i in range(count)}
        launches.append(Stage(func, tuple(given.get(name, name) for name in names)))
        before += count
    return Staged(tuple(launches))


@dataclass(frozen=True)
class HeadDivision:
    """How workgroups divide heads: each half of a head is `half` vectors, and a workgroup has `lanes` of
    them. `quantized`: appended rows become codes. The launch has the heads from `first` on.
    """

    half: int
    lanes: int
    normed: bool
    quantized: bool = False
    first: int = 0

    @staticmethod
    def of(job: Project, first: int = 0) -> HeadDivision:
        """How a job's heads from `first` on are divided among lanes."""
        half = job.paged.head_dim // PAIRS
        normed = job.paged.norm_eps is not None or job.paged.v_norm_eps is not None
        quantized = job.paged.append and job.paged.kv_dtype in BITS
        lines = (lanes for lanes in range(LANES, half) if half % lanes == 0)
        return HeadDivision(
            half, half if normed or quantized else next(lines, half), normed, quantized, first
        )

    def head(self, bx):
        """The head of a workgroup."""
        return bx // (self.half // self.lanes) + self.first

    def place(self, bx, tx, side):
        """The index of a lane's vector among those of all heads."""
        return (self.head(bx) * 2 + side) * self.half + self.lane(bx, tx)

    def lane(self, bx, tx):
        """The index of a lane's vector within a half."""
        return bx % (self.half // self.lanes) * self.lanes + tx

    def columns(self, heads: int) -> LaneColumns:
        """The columns of `heads` heads, counted from the first."""

        def place(bx, tx, side):
            return self.place(bx, tx, side) - self.first * 2 * self.half

        return LaneColumns(heads * self.half // self.lanes, place, 2, self.lanes)


def _deeper(tuning: Tuning) -> Tuning:
    """A tuning with twice the lanes along k, since there are half as many along the columns, within a
    workgroup's threads.
    """
    device = tuning.device
    return replace(tuning, device=replace(device, k_lanes=min(2 * device.k_lanes, MAX_THREADS // LANES)))


def _kernel(job: Project, piece: MatrixPiece, tuning: Tuning) -> tirx.PrimFunc:
    linear, paged = job.linear, job.paged
    heads = HeadDivision.of(job, piece.first // paged.head_dim)
    m, k, half, lanes = job.m, linear.matrix.k, heads.half, heads.lanes
    kv, after = paged.kv_heads, paged.norm_eps is not None and paged.norm_after
    columns = heads.columns(piece.matrix.n // paged.head_dim)
    cached, layout = Cached.of(paged, HeadVectors.of(paged)), PageWords.of(paged)
    shared = m * lanes * 4 * heads.normed + (Quantizer(layout, m).shared_bytes if heads.quantized else 0)
    product = Product(m, linear.x_dtype, piece.matrix, columns, linear.norm, shared)
    sums = Sums(product, _deeper(tuning))
    quantizer = Quantizer(layout, m, sums.own) if heads.quantized else None
    held_vectors, facts = max(sum(job.vectors.values()) // WIDTH, 1), Rows.of(paged).out[0][1] // WIDTH
    starts = {name: start // WIDTH for name, start in job.starts.items()}

    # These write statements into the kernel below, on the vectors pair[r · 2] and pair[r · 2 + 1] of a row.

    def finish(held, r, vectors, bx, ty, tx):
        """The sums of the r-th row that a lane owns, with their bias, to `pair`."""
        pair = held.mine
        sums.finish(held, r, ty, tx)
        if linear.bias:
            for side in range(2):
                added = pair[r * 2 + side] + vectors[starts["bias"] + heads.place(bx, tx, side)]
                T.buffer_store(pair, added, [r * 2 + side])

    def rotate(pair, r, turned, rows, row, bx, tx):
        """Rotate heads of q and k by the row's position."""
        if not paged.rope:
            return
        with T.If(heads.head(bx) < paged.heads + kv), T.Then():
            turn(pair, r, turned, rows, row, heads.lane(bx, tx), half)

    def multiply(pair, r, factors):
        for side in range(2):
            T.buffer_store(pair, pair[r * 2 + side] * factors[side], [r * 2 + side])

    def norm(pair, r, rstd, squares, vectors, row, bx, tx):
        """Norm a head, from the squares of all its lanes."""
        head = heads.head(bx)
        T.buffer_store(rstd, squares[row * lanes], [0])
        for lane in range(1, lanes):
            T.buffer_store(rstd, rstd[0] + squares[row * lanes + lane], [0])
        mean = rstd[0] * T.float32(1 / paged.head_dim)
        if paged.norm_eps is not None:
            start = T.Select(head < paged.heads, starts["q_norm"], starts.get("k_norm", 0))
            with T.If(head < paged.heads + kv), T.Then():
                T.buffer_store(rstd, T.rsqrt(mean + T.float32(paged.norm_eps)), [0])
                weights = (vectors[start + side * half + heads.lane(bx, tx)] for side in range(2))
                multiply(pair, r, [weight * spread(rstd[0]) for weight in weights])
        if paged.v_norm_eps is not None and paged.append:
            with T.If(head >= paged.heads + kv), T.Then():
                multiply(pair, r, [spread(T.rsqrt(mean + T.float32(paged.v_norm_eps)))] * 2)

    def put(pair, r, buffer, dtype, *places):
        """Store both vectors; the second is half a head behind the first."""
        for side in range(2):
            made = joined([stored(at(pair[r * 2 + side], place), dtype) for place in range(WIDTH)])
            T.buffer_store(buffer, made, [*places[:-1], places[-1] + side * half])

    def store_q(pair, r, rows, out, row, bx, tx):
        if paged.q_scale is not None:
            multiply(pair, r, [factor(rows, row)] * 2)
        put(pair, r, out, paged.dtype, row, heads.place(bx, tx, 0))

    def append(to, rows, k_cache, v_cache, row, bx):
        """Call `to(cache, page, head, offset)` for the cache of a head of k or v, if the row has a place in
        it.
        """
        head, place = heads.head(bx), at(rows[row, 0], PLACE)
        page, offset = place // paged.page_size, place % paged.page_size
        with T.If(place >= 0), T.Then(), T.If(head < paged.heads + kv):
            with T.Then():
                to(k_cache, page, head - paged.heads, offset)
            with T.Else():
                to(v_cache, page, head - paged.heads - kv, offset)

    def store(pair, r, rows, k_cache, v_cache, out, row, bx, tx):
        """Store heads of q to `out`, also for padding rows, and heads of k and v to the cache."""
        if not paged.append:
            store_q(pair, r, rows, out, row, bx, tx)
            return

        def to(cache, page, head, offset):
            put(pair, r, cache, paged.kv_dtype, page, head, offset, heads.lane(bx, tx))

        with T.If(heads.head(bx) < paged.heads):
            with T.Then():
                store_q(pair, r, rows, out, row, bx, tx)
            if quantizer is None:
                with T.Else():
                    append(to, rows, k_cache, v_cache, row, bx)

    def measure(pair, r, codes, vectors, row, bx, tx):
        """Measure the vectors of k and v, for lanes that need to know each other's values before they become
        codes.
        """
        head = heads.head(bx)
        if paged.rounds_keys:
            with T.If((head >= paged.heads) & (head < paged.heads + kv)), T.Then():
                for side in range(2):
                    constant = vectors[starts["k_rounding"] + rounding(head, side, tx)]
                    T.buffer_store(pair, pair[r * 2 + side] - constant, [r * 2 + side])
        with T.If(head >= paged.heads), T.Then():
            for side in range(2):
                quantizer.measure(codes, row, side * half + tx, pair, r * 2 + side)

    def rounding(head, side, tx):
        """The index of a lane's vector in the constants of a key."""
        return ((head - paged.heads) * 2 + side) * half + tx

    def encode(pair, r, codes, weights, vectors, row, bx, tx):
        """Quantize the two vectors of `pair`."""
        head = heads.head(bx)
        T.buffer_store(weights, spread(T.float32(0)), [0])
        with T.If(head >= paged.heads), T.Then():
            for side in range(2):
                if paged.rounds_keys:
                    start = starts["k_rounding"] + kv * 2 * half
                    with T.If(head < paged.heads + kv), T.Then():
                        T.buffer_store(weights, vectors[start + rounding(head, side, tx)], [0])
                quantizer.encode(codes, row, side * half + tx, pair, r * 2 + side, weights[0])

    def write(r, codes, rows, k_cache, v_cache, row, bx, tx):
        """Write the codes of a row to the cache."""

        def to(cache, page, head, offset):
            for side in range(2):
                quantizer.write(codes, row, side * half + tx, r * 2 + side, cache, page, head, offset)

        with T.If(heads.head(bx) >= paged.heads), T.Then():
            append(to, rows, k_cache, v_cache, row, bx)

    @prim_func
    def kernel(
        x: T.Buffer((linear.m, k // WIDTH), f"{linear.x_dtype}x{WIDTH}"),
        w0: T.Buffer(sums.words[0], sums.words[1]),
        w1: T.Buffer(sums.scales[0], sums.scales[1]),
        vectors: T.Buffer((held_vectors,), f"float32x{WIDTH}"),
        rows: T.Buffer((m, facts), f"int32x{WIDTH}"),
        k_h: T.handle,
        v_h: T.handle,
        out: T.Buffer((m, paged.heads * 2 * half), f"{paged.dtype}x{WIDTH}"),
    ):
        pages = T.int32()
        k_cache = T.match_buffer(k_h, cached.extents(pages), cached.dtype)
        v_cache = T.match_buffer(v_h, cached.extents(pages), cached.dtype)
        for bx in T.thread_binding(columns.workgroups, thread="blockIdx.x"):
            for ty in T.thread_binding(sums.splits, thread="threadIdx.y"):
                for tx in T.thread_binding(lanes, thread="threadIdx.x"):
                    held = T.meta_var(sums.memory())
                    codes = T.meta_var(quantizer.memory() if heads.quantized else None)
                    turned = T.alloc_local((2,), f"float32x{WIDTH}")
                    rstd = T.alloc_local((1,), "float32")
                    weights = T.alloc_local((1,), f"float32x{WIDTH}")
                    squares = T.alloc_shared((m * lanes if heads.normed else 1,), "float32")
                    row = T.alloc_local((m,), "int32")
                    for i in T.unroll(m):
                        row[i] = i
                    sums.add(held, rows_of(x, row), vectors, w0, w1, bx, ty, tx)
                    for r in T.unroll(sums.own):
                        if sums.row(r, ty) < m:
                            finish(held, r, vectors, bx, ty, tx)
                            if after:
                                rotate(held.mine, r, turned, rows, sums.row(r, ty), bx, tx)
                            if heads.normed:
                                squares[sums.row(r, ty) * lanes + tx] = total(
                                    held.mine[r * 2] * held.mine[r * 2]
                                    + held.mine[r * 2 + 1] * held.mine[r * 2 + 1]
                                )
                    if heads.normed:
                        T.tvm_storage_sync("shared")
                    for r in T.unroll(sums.own):
                        if sums.row(r, ty) < m:
                            if heads.normed:
                                norm(held.mine, r, rstd, squares, vectors, sums.row(r, ty), bx, tx)
                            if not after:
                                rotate(held.mine, r, turned, rows, sums.row(r, ty), bx, tx)
                            store(held.mine, r, rows, k_cache, v_cache, out, sums.row(r, ty), bx, tx)
                            if heads.quantized:
                                measure(held.mine, r, codes, vectors, sums.row(r, ty), bx, tx)
                    if heads.quantized:
                        T.tvm_storage_sync("shared")
                        for r in T.unroll(sums.own):
                            if sums.row(r, ty) < m:
                                encode(held.mine, r, codes, weights, vectors, sums.row(r, ty), bx, tx)
                        if quantizer.joins:
                            T.tvm_storage_sync("shared")
                        for r in T.unroll(sums.own):
                            if sums.row(r, ty) < m:
                                write(r, codes, rows, k_cache, v_cache, sums.row(r, ty), bx, tx)

    return kernel
