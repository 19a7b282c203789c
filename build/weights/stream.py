"""Weights from the checkpoint to the writers of all targets, a slice of rows at a time, quantized once.

Worker threads read and quantize the next slices while this thread writes: everything heavy runs without the
interpreter's lock. Memory is that of a few slices, and of one parameter where a writer asks for whole ones.
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
from nearfar.build.weights.packed.contract import Packed
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
from nearfar.build.weights.solved import Solved
from nearfar.errors import CheckpointError
from nearfar.format.manifest import CARRIED, Carriage, Weights
from nearfar.kernels.quantized import Array, Matrix, QuantTensor
from nearfar.processors import processors
from nearfar.step.params import Param

KEPT = "as in the checkpoint"
"""The report's method where codes are carried over."""
Piece = QuantTensor | Array  # rows of a matrix: quantized, or float16 or float32 where it stays dense

WORKERS = processors()
AHEAD = 2 * WORKERS  # slices in flight


class WeightWriter(Protocol):
    """Writes a target's weights; everything arrives in the order of the parameters, and of their sources.

    A writer is a RowWriter or a MatrixWriter. Leaving its context closes what is open, also after an error.
    """

    def vector(self, param: Param, values: npt.NDArray[np.float32]) -> None:
        """A parameter that is no matrix."""
        ...

    def finish(self) -> Weights:
        """Close the files; the manifest's `weights`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class RowWriter(WeightWriter, Protocol):
    """Takes matrices in slices: memory then holds a few of them."""

    def rows(self, tensor: str, piece: Piece) -> None:
        """The next rows of a tensor of the checkpoint."""
        ...


@runtime_checkable
class MatrixWriter(WeightWriter, Protocol):
    """Takes whole matrices, because its layout mixes rows: memory then holds one parameter."""

    def matrix(self, param: Param, matrix: Matrix, tensor: Piece) -> None:
        """A matrix parameter: its sources' rows, stacked."""
        ...


@dataclass
class Report:
    """Which matrices were quantized and which stayed dense, with the reason; how it was done."""

    quantized: list[str] = field(default_factory=list)
    dense: list[dict[str, str]] = field(default_factory=list)
    method: str = METHOD
    rounded: int = 0
    """Scales and biases of a quantized checkpoint that float16 could not hold exactly."""
    packed: str | None = None
    """The format that the checkpoint is quantized in."""
    carried: dict[str, Carriage] = field(default_factory=dict)
    """What became of each matrix that was quantized in the checkpoint: of its sources, the worst."""
    steps: dict[str, float] = field(default_factory=dict)
    """By how much of a step its weights changed at most, where its codes were carried and its offsets not."""
    anew: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Tensors whose codes are made anew in a build that keeps a checkpoint's codes: how many, by what they
    were and what they become.
    """
    keys: str | None = None
    """The text by which keys of a cache of 4 bits are rounded."""
    skipped: dict[str, int] = field(default_factory=dict)
    """How many tensors were left out that belong to other parts of a model than its text, by how they
    begin.
    """


@dataclass(frozen=True)
class _Job:
    """Rows [start, stop) of one source of a parameter; `last` of the parameter."""

    param: Param
    tensor: str
    start: int
    stop: int
    last: bool


@dataclass(frozen=True)
class _Done:
    """A slice as it is stored; what became of codes that the checkpoint has, None where it has none."""

    piece: Piece
    carried: Carriage | None = None
    step: float = 0.0
    rounded: int = 0


@dataclass(frozen=True)
class WeightStream:
    """The parameters of a checkpoint as slices in order. `keeps`: the matrices of `packed` whose codes are
    carried over; the others are quantized anew.
    """

    params: Sequence[Param]
    matrices: dict[str, Matrix]
    checkpoint: Checkpoint
    packed: Packed | None
    keeps: Collection[str]
    report: Report
    solved: Solved | None = None
    """Tensors that are quantized already, by a calibration."""

    def write(self, writers: Sequence[WeightWriter], advance: Callable[[int], None]) -> None:
        """Read, check, quantize, hand to the writers; `advance` is told bytes of the checkpoint as they
        are done.
        """
        by_rows = [writer for writer in writers if isinstance(writer, RowWriter)]
        by_matrix = [writer for writer in writers if isinstance(writer, MatrixWriter)]
        parts: list[Piece] = []
        for job, done in self._slices():
            param = job.param
            self._note(param, done)
            if param.is_matrix:
                for rows in by_rows:
                    rows.rows(job.tensor, done.piece)
            if by_matrix or not param.is_matrix:
                parts.append(done.piece)
            if job.last and param.is_matrix and by_matrix:
                tensor = _stack(parts)
                for whole in by_matrix:
                    whole.matrix(param, self.matrices[param.name], tensor)
            elif job.last and not param.is_matrix:
                vector = np.concatenate([to_float32(part) for part in parts if isinstance(part, np.ndarray)])
                for writer in writers:
                    writer.vector(param, vector)
            if job.last:
                parts = []
            advance(self._bytes(job))

    def _note(self, param: Param, done: _Done) -> None:
        """Keep what became of a matrix: of its slices, the worst."""
        report, name = self.report, param.name
        report.rounded += done.rounded
        if done.carried is not None:
            report.carried[name] = max(report.carried.get(name, "exact"), done.carried, key=CARRIED.index)
            report.steps[name] = max(report.steps.get(name, 0.0), done.step)

    def _slices(self) -> Iterator[tuple[_Job, _Done]]:
        """The slices in order, worked on ahead of the caller."""
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
            for index, (name, n) in enumerate(param.tensors.items()):
                for start, stop in slices(n, param.k) if param.is_matrix else [(0, n)]:
                    yield _Job(param, name, start, stop, index == len(param.tensors) - 1 and stop == n)

    def _work(self, job: _Job) -> _Done:
        """Read a slice and bring it into the form in which it is stored."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found, and named, below
            return self._done(job)

    def _done(self, job: _Job) -> _Done:
        if not job.param.is_matrix:
            return _Done(to_float32(self._finite(job)))
        matrix = self.matrices[job.param.name]
        packed = self.packed if self.packed is not None and job.tensor in self.packed.tensors else None
        if packed is not None and matrix.quantized and job.tensor in self.keeps:
            found = packed.carry(job.tensor, job.start, job.stop)
            rows = found.rows.widened(matrix.bits, matrix.group, matrix.k)
            return _Done(rows, CARRIED[1] if found.step else CARRIED[0], found.step, found.rounded)
        anew: Carriage | None = "requantized" if packed is not None else None
        if self.solved is not None and job.tensor in self.solved:
            return _Done(self.solved[job.tensor][slice(job.start, job.stop)], anew)
        if not matrix.quantized:
            return _Done(_dense(self._finite(job), matrix, job.tensor), anew)
        dtype = np.dtype(np.float32) if packed is not None else self.checkpoint.entries[job.tensor].dtype
        piece = Slice.empty(job.stop - job.start, matrix.k, matrix.group, dtype)
        if packed is None and dtype == piece.rows.dtype:
            self.checkpoint.read_into(job.tensor, job.start, piece.rows)
        else:
            piece.rows[...] = self._rows(job)
        scheme = Scheme(matrix.bits, matrix.group)
        return _Done(quantize_slice(piece, scheme, job.tensor, job.start), anew)

    def _rows(self, job: _Job) -> Array:
        """A slice as floats, dequantized where the checkpoint has codes."""
        if self.packed is not None and job.tensor in self.packed.tensors:
            return self.packed.weights(job.tensor, job.start, job.stop)
        return self.checkpoint.read(job.tensor, job.start, job.stop)

    def _finite(self, job: _Job) -> Array:
        array = self._rows(job)
        check_finite(job.tensor, array)
        return array

    def _bytes(self, job: _Job) -> int:
        """Bytes of the checkpoint that a slice was made from; in all of them as many as its tensors have."""
        packed = self.packed is not None and job.tensor in self.packed.tensors
        names = self.packed.entries(job.tensor) if self.packed is not None and packed else (job.tensor,)
        sizes = [self.checkpoint.entries[name].bytes for name in names]
        rows = job.param.tensors[job.tensor]
        return sum(size * job.stop // rows - size * job.start // rows for size in sizes)


def _stack(parts: Sequence[Piece]) -> Piece:
    """A parameter of its slices, which are all of one kind."""
    quantized = [part for part in parts if isinstance(part, QuantTensor)]
    return (
        stack(quantized)
        if quantized
        else np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    )


def _dense(rows: Array, matrix: Matrix, name: str) -> Array:
    """Rows in the matrix's dtype; CheckpointError where float16 cannot hold them."""
    if matrix.bits == 32:
        return to_float32(rows)
    return to_float16(rows, name)


def to_float16(values: Array, name: str) -> npt.NDArray[np.float16]:
    """The nearest float16 values of a floating array; CheckpointError where they are beyond its range."""
    wide = to_float32(values) if values.dtype in (ml_dtypes.bfloat16, np.float32) else values
    largest = float(np.abs(wide).max(initial=0.0))
    if largest > LARGEST:
        raise CheckpointError(
            f"{name}: {largest:g} is beyond float16 (65504); quantize it or store it as float32"
        )
    return wide.astype(np.float16)
