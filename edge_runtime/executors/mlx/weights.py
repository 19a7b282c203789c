"""Loads the weights of an MLX artifact from files in mlx-lm's format, and applies each
parameter's factors.

The files hold the checkpoint's own tensors. A parameter is made of rows of them: rows are put in the
parameter's order, matrices with the same quantization are joined to one, and the offset and the scale of a
vector are applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.executors.mlx.calls import Arrays
from nearfar.edge_runtime.executors.mlx.stacks import Stack
from nearfar.errors import ArtifactError
from nearfar.step.params import Param, TensorPiece

AFFINE = ("scales", "biases")
"""Names of the tensors that belong to the codes of a quantized matrix."""


@dataclass(frozen=True)
class MlxMatrix:
    """A matrix [N, K]: floats, or codes (uint32 [N, K·bits/32]) with a scale and a bias for each group of a
    row.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 0

    @staticmethod
    def of(parts: Mapping[str, mx.array], k: int) -> MlxMatrix:
        """Make a matrix of `k` columns from its weight and, if it is quantized, its scales and biases.

        Bits and group size follow from the shapes.
        """
        weight = parts["weight"]
        if "scales" not in parts:
            return MlxMatrix(weight)
        return MlxMatrix(
            weight, parts["scales"], parts["biases"], 32 * weight.shape[1] // k, k // parts["scales"].shape[1]
        )

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply with x [..., K]: the result is [..., N]."""
        if self.scales is None:
            return x @ self.weight.T
        return mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
        )

    def rows(self, index: mx.array) -> mx.array:
        """Rows of the matrix, dequantized: [len(index), K]."""
        if self.scales is None or self.biases is None:
            return self.weight[index]
        codes, scales, biases = self.weight[index], self.scales[index], self.biases[index]
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)

    @property
    def k(self) -> int:
        """The number of columns."""
        width = self.weight.shape[1]
        return width if self.scales is None else 32 * width // self.bits

    @property
    def arrays(self) -> list[mx.array]:
        return [part for part in (self.weight, self.scales, self.biases) if part is not None]


@dataclass(frozen=True)
class Joined:
    """Matrices with the same input: they give their products as separate arrays."""

    matrices: tuple[MlxMatrix, ...]

    @property
    def k(self) -> int:
        """See reading.MatrixWeights."""
        return self.matrices[0].k

    @property
    def widths(self) -> list[int]:
        """See reading.MatrixWeights."""
        return [len(matrix.weight) for matrix in self.matrices]

    def __call__(self, x: mx.array) -> Arrays:
        """Multiply each matrix with x [..., K]."""
        return [matrix(x) for matrix in self.matrices]

    def rows(self, index: mx.array) -> mx.array:
        """Rows of the only matrix, dequantized: [len(index), K]."""
        (matrix,) = self.matrices
        return matrix.rows(index)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays of all matrices."""
        return [array for matrix in self.matrices for array in matrix.arrays]


def join(matrices: Sequence[MlxMatrix]) -> Joined:
    """Join matrices by rows: neighbours with the same quantization become one matrix, so one launch."""
    runs: list[list[MlxMatrix]] = []
    for matrix in matrices:
        if runs and (runs[-1][0].bits, runs[-1][0].group_size) == (matrix.bits, matrix.group_size):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    return Joined(tuple(_stacked(run) for run in runs))


def _stacked(matrices: list[MlxMatrix]) -> MlxMatrix:
    first = matrices[0]
    if len(matrices) == 1:
        return first
    weight, *affine = (
        mx.concatenate(list(parts), axis=0) for parts in zip(*(m.arrays for m in matrices), strict=True)
    )
    scales, biases = affine or (None, None)
    return MlxMatrix(weight, scales, biases, first.bits, first.group_size)


class LoadedWeights:
    """The parameters of a step on the device. See reading.Weights."""

    def __init__(self, root: Path, files: Sequence[str], params: Sequence[Param], dtype: mx.Dtype) -> None:
        """Read the files. `dtype`: the type of all arrays except codes and vectors."""
        self._root, self._dtype = root, dtype
        self._tensors: dict[str, mx.array] = {}
        for file in files:
            loaded = mx.load(str(root / file))
            assert isinstance(loaded, dict)
            self._tensors.update(loaded)
        self._uses = Counter(tensor for param in params for tensor in param.tensors)
        self._stacks = {param.name: param.stack for param in params}
        self._matrices: dict[str, Joined] = {}
        self._vectors: dict[str, mx.array] = {}
        self._cast: dict[tuple[str, mx.Dtype], Arrays] = {}
        for param in params:
            made = [self._load(param, piece) for piece in param.pieces]
            if param.is_matrix:
                self._matrices[param.name] = joined = join([MlxMatrix.of(parts, param.k) for parts in made])
                mx.eval(
                    joined.arrays
                )  # the matrices are joined one by one, so that at most one exists both joined and apart
            else:
                stacked = mx.concatenate(
                    [
                        piece.scale * parts["weight"].astype(mx.float32)
                        for piece, parts in zip(param.pieces, made, strict=True)
                    ]
                )
                self._vectors[param.name] = param.offset + param.scale * stacked
                mx.eval(self._vectors[param.name])
            del made
            self._release(param)
        if self._tensors:
            raise ArtifactError(
                f"{root} has tensors that its step does not: {', '.join(sorted(self._tensors)[:8])}"
            )
        matrices = (array for joined in self._matrices.values() for array in joined.arrays)
        self.nbytes = sum(array.nbytes for array in (*matrices, *self._vectors.values()))
        """Bytes of the arrays."""

    def matrix(self, name: str) -> Joined:
        """See reading.Weights."""
        return self._matrices[name]

    def stack(self, name: str) -> Stack:
        """See reading.Weights."""
        (matrix,), count = self._matrices[name].matrices, self._stacks[name]
        weight, *affine = (mx.unflatten(part, 0, (count, -1)) for part in matrix.arrays)
        scales, biases = affine or (None, None)
        return Stack(weight, scales, biases, matrix.bits, matrix.group_size)

    def vector(self, name: str, dtype: mx.Dtype) -> Arrays:
        """See reading.Weights; each dtype is cast once."""
        key = (name, dtype)
        if key not in self._cast:
            self._cast[key] = (self._vectors[name].astype(dtype),)
        return self._cast[key]

    def _load(self, param: Param, piece: TensorPiece) -> dict[str, mx.array]:
        """The rows of a piece in its tensor, and in the tensor's scales and biases."""
        base = piece.tensor.removesuffix(".weight")
        names = {"weight": piece.tensor}
        if param.is_matrix and f"{base}.{AFFINE[0]}" in self._tensors:
            names |= {part: f"{base}.{part}" for part in AFFINE}
        return {part: self._rows(name, piece, wide=not param.is_matrix) for part, name in names.items()}

    def _rows(self, name: str, piece: TensorPiece, wide: bool) -> mx.array:
        tensor = self._tensors.get(name)
        if tensor is not None and piece.stack:
            tensor = mx.flatten(tensor, 0, 0 if wide and tensor.ndim == 1 else 1)
        end = piece.start + piece.rows
        if tensor is None or len(tensor) < end:
            found = "is not there" if tensor is None else f"has {len(tensor)} rows, not {end}"
            raise ArtifactError(
                f"{self._root}: tensor {name} {found}. Copy the artifact again, or build it again"
            )
        rows = tensor if (piece.start, end) == (0, len(tensor)) else tensor[piece.start : end]
        if piece.order is not None and not piece.order.trivial:
            rows = rows[mx.array(np.array(piece.order.rows(piece.rows), np.int32))]
        return rows if wide or rows.dtype == mx.uint32 else rows.astype(self._dtype)

    def _release(self, param: Param) -> None:
        """Free tensors that no later parameter is made of."""
        for tensor in param.tensors:
            self._uses[tensor] -= 1
            if not self._uses[tensor]:
                base = tensor.removesuffix(".weight")
                for name in (tensor, *(f"{base}.{part}" for part in AFFINE if param.is_matrix)):
                    self._tensors.pop(name, None)
