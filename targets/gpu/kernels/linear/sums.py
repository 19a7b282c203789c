"""Sums of a matrix's columns with few rows: the loop of the matvec, also for kernels with another beginning
or end.

A lane owns vectors of four neighbouring columns and reads a row of their words as one vector of 16 bytes;
neighbouring lanes read whole lines. The other dimension of a workgroup is along k: a lane loads all words and
scales of a batch before it uses the first, and one barrier joins the lanes' sums in workgroup memory. Each
row of the result is added up and finished by certain lanes, its owners.

Products are made by products.py in float32, or by halves.py in f16 programs if rows are float16. Rows of
float32 are the residual stream, in which a few channels may be thousands of times as large as all others
(docs/decisions/0003). Scale and bias stay out of the inner loop, and the norm's rstd comes at the end: its
sum of squares is computed on the way, as in the software kernels. (Packed int8 products are for many rows
only, matmul_int8.py. A subgroup's sum before `part` is written would be another order of summation, so it
would need a variant of its own.)

A kernel calls, inside its thread bindings (`columns.workgroups`, `splits` lanes along k, `columns.lanes`
along n): `memory`; `add`, which ends with the barrier; and, in the owners of a row, `finish`. The kernel then
uses the finished sums; if it needs those of other lanes, it adds a barrier.
"""

# mypy: ignore-errors
# TVMScript: what is written here are statements of the kernel that is being parsed.
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.classes import SHARED_BYTES, DeviceClass, Tuning
from nearfar.targets.gpu.kernels.common import ceil_div, fma
from nearfar.targets.gpu.kernels.linear.halves import Halves, in_pairs
from nearfar.targets.gpu.kernels.linear.lookup import Lookup
from nearfar.targets.gpu.kernels.linear.products import F32X4, ChunkSums, Inputs, TileProducts
from nearfar.targets.gpu.kernels.script.scales import GroupRegisters, GroupScales
from nearfar.targets.gpu.kernels.script.text import local_array, shared_array
from nearfar.targets.gpu.kernels.script.vectors import (
    WIDTH,
    ColumnReader,
    clear,
    f32x4,
    number,
    or_zero,
    scale_buffer,
    spread,
    word_buffer,
)
from nearfar.targets.gpu.packing import parts

LANES = 8  # lanes of 16 bytes: a segment of 128 bytes
AHEAD = 8  # words that a lane loads before it uses the first
LARGE = 1 << 20  # bytes of a matrix from which on a launch should have the threads of its class
LONGEST = 128  # batches of a row, divided by the most lanes along k; with as many a lane may wait for memory
FULL = 0.9  # share of the lanes' steps that should have work


@dataclass(frozen=True)
class LaneColumns:
    """The columns of a launch's lanes: `sides` vectors of four for each lane.

    `place(bx, tx, side)`: the index of a vector among the matrix's columns. Lanes past the last column get an
    existing one.
    """

    workgroups: int
    place: Callable[[Any, Any, int], Any]
    sides: int = 1
    lanes: int = LANES


@dataclass(frozen=True)
class Product:
    """`m` rows of `x_dtype` times a matrix; `norm`: the eps of a norm of the rows, with weights for the
    inputs.

    `shared`: bytes of workgroup memory that the kernel needs in addition.
    """

    m: int
    x_dtype: str
    matrix: Matrix
    columns: LaneColumns
    norm: float | None = None
    shared: int = 0


@dataclass(frozen=True)
class LaneTiling:
    """`splits` lanes along k; a lane takes `steps` batches of `batch` chunks of `units` units each.

    The chunks of a step are neighbours: lane y has chunk (step · batch + b) · splits + y of `chunks`.
    """

    splits: int
    units: int
    chunks: int
    batch: int
    steps: int

    @property
    def ragged(self) -> bool:
        """Whether some lanes have less work than others."""
        return self.splits * self.batch * self.steps != self.chunks


def tiling(job: Product, device: DeviceClass) -> LaneTiling:
    """The fewest lanes along k with which the launch has its class's threads and bytes in flight, in few
    steps.
    """
    size = sum(math.prod(part.shape) * 4 for part in parts(job.matrix))
    launched = device.launched if size >= LARGE else 0
    made = [_split(job, splits) for splits in _splits(job, device)]
    for plan in made:
        enough = _in_flight(job, plan) >= min(device.in_flight, size * FULL)
        if enough and _threads(job, plan) >= launched and plan.steps <= LONGEST // device.k_lanes:
            return plan
    return made[-1]


def _splits(job: Product, device: DeviceClass) -> list[int]:
    """Powers of two that make whole subgroups, if some do, and whose sums fit into workgroup memory."""
    lanes = job.columns.lanes
    most = max(device.k_lanes * LANES // lanes, 1)
    counts = [1 << i for i in range(most.bit_length())]
    fitting = [splits for splits in counts if shared_bytes(job, splits) + job.shared <= SHARED_BYTES]
    return [splits for splits in fitting if lanes * splits % device.subgroup == 0] or fitting


def shared_bytes(job: Product, splits: int) -> int:
    """Bytes of workgroup memory in which the lanes' sums meet, and for the values of a table."""
    sums = ((splits - 1) * job.columns.lanes * job.columns.sides * WIDTH + splits) * job.m * 4
    return sums + Lookup(job.matrix).bytes


def _split(job: Product, splits: int) -> LaneTiling:
    """The tiling with the largest chunks that keep nearly all lanes busy: a chunk of less than a group reads
    its scale again.
    """
    reader = ColumnReader.of(job.matrix)
    ahead = max(AHEAD // (reader.words * job.columns.sides), 1)  # the number of units
    whole = job.matrix.group // reader.inputs if job.matrix.quantized else ahead
    sizes = [size for size in range(min(whole, ahead), 0, -1) if whole % size == reader.count % size == 0]

    def busy(size: int) -> float:
        chunks = reader.count // size
        return chunks / (ceil_div(chunks, splits) * splits)

    best = max(busy(size) for size in sizes)
    size = next(size for size in sizes if busy(size) >= min(best, FULL))
    each = ceil_div(reader.count // size, splits)
    most = max(ahead * 3 // 2 // size, 1)
    batch = max(count for count in range(1, most + 1) if each % count == 0)
    return LaneTiling(splits, size, reader.count // size, batch, each // batch)


def _threads(job: Product, plan: LaneTiling) -> int:
    return job.columns.workgroups * job.columns.lanes * plan.splits


def _in_flight(job: Product, plan: LaneTiling) -> int:
    """Bytes of the matrix that all threads load at once."""
    matrix, scales = job.matrix, 0
    if matrix.quantized:
        scales = matrix.scales.bytes(WIDTH, matrix.k, matrix.group) * matrix.group // matrix.k
    loads = plan.batch * (plan.units * ColumnReader.of(job.matrix).words * 16 + scales)
    return _threads(job, plan) * loads * job.columns.sides


def rows_of(x, row):
    """The function by which `Sums.add` reads a buffer of rows, with row i at row[i]: four inputs as
    float32.
    """
    return lambda i, vector: f32x4(x[row[i], vector])


@dataclass(frozen=True)
class LaneArrays:
    """Arrays of a lane, and two of the workgroup: `part`, `squares`.

    `mine` holds finished sums: side s of the r-th row that the lane owns is at r · sides + s.
    """

    part: Any
    squares: Any
    acc: Any
    mine: Any
    square: Any
    chunk: ChunkSums
    word: Any
    scale: GroupRegisters
    rstd: Any


class Sums:
    """Writes the statements of a product into the kernel that is being parsed, unrolled."""

    def __init__(self, job: Product, tuning: Tuning) -> None:
        self.job, self.plan = job, tiling(job, tuning.device)
        self.each = job.columns.sides
        self.has_norm = job.norm is not None
        paired = tuning.half and job.x_dtype == "float16" and in_pairs(job.matrix)
        kind = Halves if paired else TileProducts
        self.products = kind(job.m, self.each, self.plan.units, job.matrix)
        self.group_scales = GroupScales(job.matrix, self.plan.batch * self.each)
        self.words, self.scales = word_buffer(job.matrix), scale_buffer(job.matrix)
        """Shape and dtype of the matrix's parts."""

    @property
    def chunk_vectors(self) -> int:
        """The number of vectors of inputs in a chunk."""
        return self.plan.units * self.products.vectors

    @property
    def splits(self) -> int:
        """The number of lanes along k."""
        return self.plan.splits

    @property
    def own(self) -> int:
        """The most rows of the result that a lane finishes."""
        return ceil_div(self.job.m, self.splits)

    def row(self, r, ty):
        """The r-th row that a lane finishes; it may be beyond the last."""
        return r * self.splits + ty

    def memory(self) -> LaneArrays:
        """Declare the memory of a lane and its workgroup."""
        m, each, plan, lanes = self.job.m, self.each, self.plan, self.job.columns.lanes
        self.products.declare()
        dot, xsum = local_array("dot", m * each, F32X4), local_array("xsum", m, "float32")
        return LaneArrays(
            part=shared_array("part", (self.splits - 1) * m * each * lanes, F32X4),
            squares=shared_array("squares", self.splits * m * self.has_norm, "float32"),
            acc=local_array("acc", m * each, F32X4),
            mine=local_array("mine", self.own * each, F32X4),
            square=local_array("square", m, "float32"),
            chunk=ChunkSums(dot, xsum, local_array("chunk_square", m, "float32")),
            word=local_array("word", plan.batch * each * self.products.chunk_words, self.words[1]),
            scale=self.group_scales.declare(),
            rstd=local_array("rstd", 1, "float32"),
        )

    def add(self, held: LaneArrays, x, norm, w0, w1, bx, ty, tx) -> None:
        """Compute all products of the lane, and leave them to the owners of the rows; ends with a barrier.

        `x(i, vector)` reads four inputs of row i as float32 (rows_of, or from workgroup memory); `norm`,
        `w0`, `w1` are buffers, ignored if the product lacks them.
        """
        m, columns = self.job.m, self.job.columns
        self.products.lookup.fill(ty * columns.lanes + tx, columns.lanes * self.splits)
        clear(held.acc, m * self.each)
        for i in range(m):
            T.buffer_store(held.square, T.float32(0), [i])
        inputs = Inputs(x, norm if self.has_norm else None)
        places = [columns.place(bx, tx, side) for side in range(self.each)]
        with T.serial(self.plan.steps) as step:
            self._batch(held, inputs, w0, w1, step, ty, places)
        for i in range(m):
            self._hand_over(held, i, ty, tx)
        T.evaluate(T.tvm_storage_sync("shared"))

    def finish(self, held: LaneArrays, r, ty, tx) -> list:
        """Return the sums of the r-th row that an owner has, times the norm's rstd, as vectors of `mine`."""
        i, mine, each = self.row(r, ty), held.mine, self.each
        for side in range(each):
            for lane in range(self.splits - 1):
                other = held.part[self._slot(i, ty + 1 + lane, side, tx)]
                T.buffer_store(mine, mine[r * each + side] + other, [r * each + side])
        if self.has_norm:
            rstd, inverse = held.rstd, T.float32(1.0 / self.job.matrix.k)
            T.buffer_store(rstd, T.float32(0), [0])
            for lane in range(self.splits):
                T.buffer_store(rstd, rstd[0] + held.squares[i * self.splits + lane], [0])
            T.buffer_store(rstd, T.rsqrt(rstd[0] * inverse + T.float32(self.job.norm)), [0])
            for side in range(each):
                T.buffer_store(mine, mine[r * each + side] * spread(rstd[0]), [r * each + side])
        return [mine[r * each + side] for side in range(each)]

    def _slot(self, i, lane, side, tx):
        """The place of a lane's sums of row i: all lanes except the row's owner, in the order after it."""
        turn = (lane + self.splits - 1 - i % self.splits) % self.splits
        return ((i * (self.splits - 1) + turn) * self.each + side) * self.job.columns.lanes + tx

    def _hand_over(self, held: LaneArrays, i: int, ty, tx) -> None:
        """Give the lane's sums of row i to the row's owner."""
        each = self.each
        with T.If(ty == i % self.splits):
            with T.Then():
                for side in range(each):
                    T.buffer_store(held.mine, held.acc[i * each + side], [i // self.splits * each + side])
            if self.splits > 1:
                with T.Else():
                    for side in range(each):
                        T.buffer_store(held.part, held.acc[i * each + side], [self._slot(i, ty, side, tx)])
        if self.has_norm:
            with T.If(tx == 0), T.Then():
                T.buffer_store(held.squares, held.square[i], [i * self.splits + ty])

    def _batch(self, held: LaneArrays, inputs: Inputs, w0, w1, step, ty, places) -> None:
        """Compute a batch; every word of it is loaded before the first is used."""
        plan, products = self.plan, self.products
        chunks = [(step * plan.batch + b) * self.splits + ty for b in range(plan.batch)]
        for b, chunk in enumerate(chunks):
            self._load_words(held, w0, w1, self._inside(chunk), b, places)
        for b, chunk in enumerate(chunks if self.group_scales.levels else ()):
            for side in range(self.each):
                self.group_scales.convert(held.scale, b * self.each + side, self._group(self._inside(chunk)))
        for b, chunk in enumerate(chunks):
            start, first = b * self.each * products.chunk_words, self._inside(chunk) * self.chunk_vectors
            products.chunk(held.chunk, inputs, held.word, start, first)
            self._add_chunk(held, b, chunk < plan.chunks)

    def _group(self, chunk):
        """The group to which a chunk belongs."""
        return chunk * (self.plan.units * self.products.reader.inputs) // self.job.matrix.group

    def _inside(self, chunk):
        return T.min(chunk, self.plan.chunks - 1) if self.plan.ragged else chunk

    def _load_words(self, held: LaneArrays, w0, w1, chunk, b: int, places) -> None:
        """Load the words and scales of chunk `b` of a batch."""
        reader = self.products.reader
        for side, place in enumerate(places):
            start = (b * self.each + side) * self.products.chunk_words
            for unit in range(self.plan.units):
                for i in range(reader.words):
                    value = reader.load(w0, chunk * self.plan.units + unit, i, place)
                    T.buffer_store(held.word, value, [start + unit * reader.words + i])
            if self.job.matrix.quantized:
                self.group_scales.load(held.scale, b * self.each + side, w1, self._group(chunk), place)

    def _add_chunk(self, held: LaneArrays, b: int, valid) -> None:
        """Add scale · Σ q·x + bias · Σ x for a group, or a part of it; a chunk past the last adds nothing."""
        sums, ragged = held.chunk, self.plan.ragged
        for i in range(self.job.m):
            if self.has_norm:
                square = T.Select(valid, sums.square[i], T.float32(0)) if ragged else sums.square[i]
                T.buffer_store(held.square, held.square[i] + square, [i])
            for side in range(self.each):
                place, pair = i * self.each + side, b * self.each + side
                if self.job.matrix.quantized:
                    if ragged and i == 0:
                        self.group_scales.drop(held.scale, pair, valid)
                    self._add_scaled(held, i, place, pair)
                else:
                    value = or_zero(valid, sums.dot[place]) if ragged else sums.dot[place]
                    T.buffer_store(held.acc, held.acc[place] + value, [place])

    def _add_scaled(self, held: LaneArrays, i: int, place: int, pair: int) -> None:
        """Add sums of codes times scales, and sums of inputs times biases."""
        dot, acc, x, centre = held.chunk.dot, held.acc, spread(held.chunk.xsum[i]), self.products.centre
        if self.products.biased:
            if centre:
                T.buffer_store(dot, fma(x, number(centre), dot[place]), [place])
            T.buffer_store(acc, fma(self.group_scales.bias(held.scale, pair), x, acc[place]), [place])
        scales = self.group_scales.scale(held.scale, pair)
        T.buffer_store(acc, fma(scales, dot[place], acc[place]), [place])
