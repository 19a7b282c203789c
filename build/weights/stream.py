"""Streams weights from the checkpoint to the writers of all targets, in slices of rows; each slice is
quantized once.

Worker threads read and quantize the next slices while this thread writes: everything heavy runs without the
interpreter's lock. Memory holds a few slices, and one parameter where a writer takes whole parameters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nearfar.build.weights.checks import check_finite
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import (
    LARGEST,
    METHOD,
    Scheme,
    Slice,
    quantize_slice,
    slices,
    stack,
    to_float32,
)
from nearfar.build.weights.quantized.contract import Quantized
from nearfar.build.weights.solved import Solved
from nearfar.errors import CheckpointError
from nearfar.format.manifest import CARRIED, Carriage, Weights
from nearfar.kernels.pieces import placed
from nearfar.kernels.quantized import Array, Matrix, QuantPieces, QuantTensor
from nearfar.processors import processors
from nearfar.step.params import Param, TensorPiece

KEPT = "as in the checkpoint"
"""The report's method in a build that carries codes over."""
MatrixRows = (
    QuantTensor | Array
)  # rows of a matrix, quantized, or in float16 or float32 if the matrix stays dense

WORKERS = processors()
AHEAD = 2 * WORKERS  # the number of slices in flight


class WeightWriter(Protocol):
    """Writes a target's weights; everything arrives in the order of the parameters, and of their sources.

    A writer is a RowWriter or a MatrixWriter. Leaving its context closes what is open, also after an error.
    """

    def vector(self, param: Param, values: npt.NDArray[np.float32]) -> None:
        """Write a parameter that is not a matrix, float32 [n]."""
        ...

    def finish(self) -> Weights:
        """Close the files; gives the manifest's `weights`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class RowWriter(WeightWriter, Protocol):
    """A writer that takes matrices in slices: memory then holds a few of them."""

    def rows(self, tensor: str, piece: MatrixRows) -> None:
        """Write the next rows of a tensor of the checkpoint."""
        ...


@runtime_checkable
class MatrixWriter(WeightWriter, Protocol):
    """A writer that takes whole matrices, because its layout mixes rows: memory then holds one parameter."""

    def matrix(self, param: Param, matrix: Matrix, tensor: MatrixRows | QuantPieces) -> None:
        """Write a matrix parameter; `tensor` has the stacked rows of its sources."""
        ...


@dataclass
class WeightsReport:
    """The report of a build's weights: the matrices that were quantized, those that stayed dense with the
    reason, and the method.
    """

    quantized: list[str] = field(default_factory=list)
    dense: list[dict[str, str]] = field(default_factory=list)
    method: str = METHOD
    rounded: int = 0
    """Scales and biases of a quantized checkpoint that float16 could not hold exactly."""
    checkpoint_format: str | None = None
    """The format that the checkpoint is quantized in."""
    carried: dict[str, Carriage] = field(default_factory=dict)
    """How each matrix was carried over that the checkpoint has quantized; the worst case of its sources."""
    changes: dict[str, float] = field(default_factory=dict)
    """By how much a matrix's weights changed at most, in distances of two codes, where its codes were carried
    over and its offsets rounded.
    """
    anew: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of tensors that were requantized in a build that keeps codes, by their format in the
    checkpoint and their new scheme.
    """
    keys: str | None = None
    """A description of the calibration text for the keys of a 4-bit cache."""
    skipped: dict[str, int] = field(default_factory=dict)
    """The number of tensors that were left out because they belong to other parts of the model than its text,
    by the first part of their names.
    """


@dataclass(frozen=True)
class _Job:
    """Rows [start, stop) of one source of a parameter; `last`: they are the parameter's last ones."""

    param: Param
    tensor: str
    start: int
    stop: int
    last: bool


@dataclass(frozen=True)
class _Done:
    """A slice as it is stored, and how the checkpoint's codes were carried over; None where it has none."""

    piece: MatrixRows
    carried: Carriage | None = None
    change: float = 0.0
    rounded: int = 0


@dataclass(frozen=True)
class WeightStream:
    """Yields the parameters of a checkpoint as slices, in order. `keeps`: the matrices of `quantized` whose
    codes are carried over; the others are quantized again.
    """

    params: Sequence[Param]
    matrices: dict[str, Matrix]
    checkpoint: Checkpoint
    quantized: Quantized | None
    keeps: Collection[str]
    report: WeightsReport
    solved: Solved | None = None
    """Tensors that a calibration has quantized."""

    def write(self, writers: Sequence[WeightWriter], advance: Callable[[int], None]) -> None:
        """Read, check and quantize the slices and give them to the writers; `advance` gets the number of the
        checkpoint's bytes that each slice has finished.
        """
        by_rows = [writer for writer in writers if isinstance(writer, RowWriter)]
        by_matrix = [writer for writer in writers if isinstance(writer, MatrixWriter)]
        parts: list[MatrixRows] = []
        for job, done in self._slices():
            param = job.param
            self._note(param, done)
            if param.is_matrix:
                for rows in by_rows:
                    rows.rows(job.tensor, done.piece)
            if by_matrix or not param.is_matrix:
                parts.append(done.piece)
            if job.last and param.is_matrix and by_matrix:
                matrix = self.matrices[param.name]
                tensor = _stack(parts, matrix)
                for whole in by_matrix:
                    whole.matrix(param, matrix, tensor)
            elif job.last and not param.is_matrix:
                vector = np.concatenate([to_float32(part) for part in parts if isinstance(part, np.ndarray)])
                for writer in writers:
                    writer.vector(param, vector)
            if job.last:
                parts = []
            advance(self._bytes(job))

    def _note(self, param: Param, done: _Done) -> None:
        """Record how a matrix was carried over: the worst case of its slices."""
        report, name = self.report, param.name
        report.rounded += done.rounded
        if done.carried is not None:
            report.carried[name] = max(report.carried.get(name, "exact"), done.carried, key=CARRIED.index)
            report.changes[name] = max(report.changes.get(name, 0.0), done.change)

    def _slices(self) -> Iterator[tuple[_Job, _Done]]:
        """Yield the slices in order; threads work on the next ones."""
        waiting: deque[tuple[_Job, Future[_Done]]] = deque()
        pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="weights")
        try:
            for job in self._jobs():
                waiting.append((job, pool.submit(self._work, job)))
                if len(waiting) > AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _jobs(self) -> Iterator[_Job]:
        for param in self.params:
            last = next(reversed(param.tensors))
            for name, n in param.tensors.items():
                for start, stop in _ranges(param, name, n):
                    yield _Job(param, name, start, stop, name == last and stop == n)

    def _work(self, job: _Job) -> _Done:
        """Read a slice and convert it to its stored form."""
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are reported below
            return self._done(job)

    def _done(self, job: _Job) -> _Done:
        if not job.param.is_matrix:
            return _Done(to_float32(self._finite(job)))
        matrix = self._stored(job)
        quantized = (
            self.quantized if self.quantized is not None and job.tensor in self.quantized.tensors else None
        )
        if quantized is not None and matrix.quantized and job.tensor in self.keeps:
            found = quantized.carry(job.tensor, job.start, job.stop, matrix.scales)
            rows = _centred(found.rows, matrix).widened(matrix.bits, matrix.group, matrix.k)
            return _Done(rows, CARRIED[1] if found.change else CARRIED[0], found.change, found.rounded)
        anew: Carriage | None = "requantized" if quantized is not None else None
        if self.solved is not None and job.tensor in self.solved:
            return _Done(self.solved[job.tensor][slice(job.start, job.stop)], anew)
        if not matrix.quantized:
            return _Done(_dense(self._finite(job), matrix, job.tensor), anew)
        dtype = np.dtype(np.float32) if quantized is not None else self.checkpoint.entries[job.tensor].dtype
        piece = Slice.empty(job.stop - job.start, matrix.k, matrix.group, dtype)
        if quantized is None and dtype == piece.rows.dtype and not job.param.piece(job.tensor).stack:
            self.checkpoint.read_into(job.tensor, job.start, piece.rows)
        else:
            piece.rows[...] = self._rows(job)
        scheme = Scheme(matrix.bits, matrix.group, matrix.scales)
        return _Done(quantize_slice(piece, scheme, job.tensor, job.start), anew)

    def _stored(self, job: _Job) -> Matrix:
        """The matrix that a slice is part of: the parameter's, or the piece that has the slice's tensor."""
        matrix, first = self.matrices[job.param.name], 0
        if not matrix.pieces:
            return matrix
        for name, n in job.param.tensors.items():
            if name == job.tensor:
                break
            first += n
        return next(each.matrix for each in reversed(placed(matrix)) if each.first <= first)

    def _rows(self, job: _Job) -> Array:
        """Read a slice as floats, dequantized where the checkpoint has codes."""
        if self.quantized is not None and job.tensor in self.quantized.tensors:
            return self.quantized.weights(job.tensor, job.start, job.stop)
        return read_rows(self.checkpoint, job.param.piece(job.tensor), job.param, job.start, job.stop)

    def _finite(self, job: _Job) -> Array:
        array = self._rows(job)
        check_finite(job.tensor, array)
        return array

    def _bytes(self, job: _Job) -> int:
        """The checkpoint's bytes that a slice was made from; their sum is the tensors' size."""
        coded = self.quantized is not None and job.tensor in self.quantized.tensors
        names = self.quantized.entries(job.tensor) if self.quantized is not None and coded else (job.tensor,)
        sizes = [self.checkpoint.entries[name].bytes for name in names]
        rows = job.param.tensors[job.tensor]
        return sum(size * job.stop // rows - size * job.start // rows for size in sizes)


def _centred(rows: QuantTensor, matrix: Matrix) -> QuantTensor:
    """Move codes up where they are stored with more bits and without offsets: the code that stands for 0 is
    2^(bits - 1). Weights stay as they are.
    """
    by = matrix.zero - matrix.scales.zero(rows.bits)
    if not by:
        return rows
    biases = (rows.scales * np.float32(-matrix.zero)).astype(np.float16)
    return QuantTensor.of_codes(rows.codes + np.uint8(by), rows.scales, biases, matrix.bits)


def _ranges(param: Param, tensor: str, n: int) -> list[tuple[int, int]]:
    """The ranges of rows of a tensor that are read together; none crosses the border of two matrices."""
    if not param.is_matrix:
        return [(0, n)]
    piece = param.piece(tensor)
    each = n // (piece.stack or 1)
    parts = [(0, each)] if piece.transposed else slices(each, param.k)
    return [(first + start, first + stop) for first in range(0, n, each) for start, stop in parts]


def read_rows(
    checkpoint: Checkpoint, piece: TensorPiece, param: Param, start: int = 0, stop: int | None = None
) -> Array:
    """Read rows [start, stop) of the tensor of a piece, as the parameter has them: [rows, k], or [rows] of a
    vector. If the tensor holds several matrices, the rows of all of them are read.
    """
    if not piece.stack and not piece.transposed:
        return checkpoint.read(piece.tensor, start, stop)
    rows = param.tensors[piece.tensor]
    stop = rows if stop is None else min(stop, rows)
    each = rows // (piece.stack or 1)
    first = start // each
    held = checkpoint.read(piece.tensor, *([first, -(-stop // each)] if piece.stack else []))
    if piece.transposed:
        held = held.swapaxes(-1, -2)
    flat = held.reshape(-1, param.k) if param.is_matrix else held.reshape(-1)
    return np.ascontiguousarray(flat[start - first * each : stop - first * each])


def _stack(parts: Sequence[MatrixRows], matrix: Matrix) -> MatrixRows | QuantPieces:
    """Concatenate the slices of a parameter, which are all quantized or all dense; those of each piece apart,
    if the matrix has pieces.
    """
    quantized = [part for part in parts if isinstance(part, QuantTensor)]
    if matrix.pieces:
        left, stacked = deque(quantized), []
        for piece in matrix.pieces:
            some: list[QuantTensor] = []
            while sum(len(part.words) for part in some) < piece.n:
                some.append(left.popleft())
            stacked.append(stack(some))
        return QuantPieces(tuple(stacked))
    return (
        stack(quantized)
        if quantized
        else np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    )


def _dense(rows: Array, matrix: Matrix, name: str) -> Array:
    """Convert rows to the matrix's dtype. Raises CheckpointError where float16 cannot hold them."""
    if matrix.bits == 32:
        return to_float32(rows)
    return to_float16(rows, name)


def to_float16(values: Array, name: str) -> npt.NDArray[np.float16]:
    """Convert a floating array to float16. Raises CheckpointError for values beyond its range."""
    wide = to_float32(values) if values.dtype in (ml_dtypes.bfloat16, np.float32) else values
    largest = float(np.abs(wide).max(initial=0.0))
    if largest > LARGEST:
        raise CheckpointError(
            f"{name}: {largest:g} is beyond float16 (65504); quantize it or store it as float32"
        )
    return wide.astype(np.float16)
