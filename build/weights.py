"""Weights from the checkpoint into the weight streams of all targets, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import ml_dtypes
import numpy as np

from nearfar.build.checkpoint import Checkpoint, check_finite
from nearfar.build.params import Param
from nearfar.build.quantize import Scheme, quantize_rows, to_float32
from nearfar.build.shards import ShardWriter
from nearfar.errors import CheckpointError
from nearfar.targets.base import Array, Kernels, Matrix, QuantTensor


@dataclass
class Report:
    """Which matrices were quantized and which stayed dense, with the reason."""

    quantized: list[str] = field(default_factory=list)
    dense: list[dict[str, str]] = field(default_factory=list)


def choose_matrices(
    params: Sequence[Param], checkpoint: Checkpoint, scheme: Scheme
) -> tuple[dict[str, Matrix], Report]:
    """How each matrix is stored: quantized where its width allows, else float16 (float32 if that is what it came as)."""
    matrices, report = {}, Report()
    for param in params:
        if not param.is_matrix:
            continue
        if scheme.fits(param.k):
            matrices[param.name] = Matrix(param.n, param.k, scheme.bits, scheme.group_size)
            report.quantized.append(param.name)
            continue
        wide = scheme.bits == 0 and any(checkpoint.dtypes[name] == np.float32 for name, _ in param.sources)
        matrices[param.name] = Matrix(param.n, param.k, 32 if wide else 16)
        reason = f"width {param.k} is no multiple of group size {scheme.group_size}"
        report.dense.append({"name": param.name, "reason": reason if scheme.bits else "not asked for (--quant none)"})
    return matrices, report


def stream_weights(
    params: Sequence[Param],
    matrices: dict[str, Matrix],
    checkpoint: Checkpoint,
    scheme: Scheme,
    outputs: Sequence[tuple[Kernels, ShardWriter]],
    advance: Callable[[int], None],
) -> None:
    """Read, check, quantize once, pack for each target, write. Memory holds one parameter; `advance` counts its bytes."""
    for param in params:
        source = _Rows(param, checkpoint)
        if not param.is_matrix:
            vector = to_float32(source.read(0, param.n))
            for _, writer in outputs:
                writer.add(param.name, vector)
        else:
            matrix = matrices[param.name]
            tensor = _matrix(source, matrix, scheme)
            for kernels, writer in outputs:
                packed = kernels.pack(matrix, tensor)
                for part, array in zip(kernels.parts(matrix), packed, strict=True):
                    writer.add(f"{param.name}.{part.name}", array)
        advance(source.bytes)


class _Rows:
    """Rows of a parameter, read across the tensors that it is stacked from."""

    def __init__(self, param: Param, checkpoint: Checkpoint) -> None:
        self._param, self._checkpoint = param, checkpoint
        self.bytes = sum(checkpoint.entries[name].bytes for name, _ in param.sources)

    def read(self, start: int, stop: int) -> Array:
        pieces: list[Array] = []
        borders = np.cumsum([0, *(rows for _, rows in self._param.sources)]).tolist()
        for (name, _), (first, last) in zip(self._param.sources, pairwise(borders), strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                pieces.append(self._checkpoint.read(name, low - first, high - first))
                check_finite(name, pieces[-1])
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([to_float32(piece) for piece in pieces])

    def all(self) -> Array:
        return self.read(0, self._param.n)

    @property
    def name(self) -> str:
        return self._param.name


def _matrix(source: _Rows, matrix: Matrix, scheme: Scheme) -> QuantTensor | Array:
    if matrix.quantized:
        return quantize_rows(source.read, (matrix.n, matrix.k), scheme, source.name)
    dense = source.all()
    if matrix.bits == 32:
        return to_float32(dense)
    wide = to_float32(dense) if dense.dtype in (ml_dtypes.bfloat16, np.float32) else dense
    largest = float(np.abs(wide).max(initial=0.0))
    if largest > float(np.finfo(np.float16).max):
        raise CheckpointError(
            f"{source.name}: {largest:g} is beyond float16 (65504); quantize it or store it as float32"
        )
    return wide.astype(np.float16)
