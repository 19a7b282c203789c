"""Weights of an MLX artifact: the files as mlx-lm writes them, with matrices that share an input joined."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import ArtifactError


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K]: dense, or codes (uint32 [N, K·bits/32]) with a scale and a bias for each group of a row."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 0
    added: mx.array | None = None
    """[N], added to every product; None where the layer has no bias."""

    def __call__(self, x: mx.array) -> mx.array:
        """The product with x [M, K], an output a row of the matrix: [M, N]."""
        if self.scales is None:
            out = x @ self.weight.T
        else:
            out = mx.quantized_matmul(
                x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group_size, bits=self.bits
            )
        return out if self.added is None else out + self.added

    def rows(self, index: mx.array) -> mx.array:
        """Rows of the matrix, dequantized: [len(index), K]."""
        if self.scales is None or self.biases is None:
            return self.weight[index]
        codes, scales, biases = self.weight[index], self.scales[index], self.biases[index]
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)

    @property
    def arrays(self) -> list[mx.array]:
        """What it holds."""
        return [part for part in (self.weight, self.scales, self.biases, self.added) if part is not None]


@dataclass(frozen=True)
class Joined:
    """Matrices of different kinds that share an input: their products side by side."""

    matrices: tuple[Matrix, ...]

    def __call__(self, x: mx.array) -> mx.array:
        """The products with x [M, K]: [M, sum of N]."""
        return mx.concatenate([matrix(x) for matrix in self.matrices], axis=-1)

    @property
    def arrays(self) -> list[mx.array]:
        """What they hold."""
        return [array for matrix in self.matrices for array in matrix.arrays]


Linear = Matrix | Joined


def join(matrices: Sequence[Matrix]) -> Linear:
    """One matrix with the rows of all, where they are quantized alike: one launch in place of several."""
    first = matrices[0]
    alike = all(
        (m.bits, m.group_size, m.added is None) == (first.bits, first.group_size, first.added is None) for m in matrices
    )
    if not alike:
        return Joined(tuple(matrices))

    def rows(parts: Sequence[mx.array | None]) -> mx.array | None:
        given = [part for part in parts if part is not None]
        return mx.concatenate(given, axis=0) if given else None

    weight = rows([m.weight for m in matrices])
    assert weight is not None
    scales, biases = rows([m.scales for m in matrices]), rows([m.biases for m in matrices])
    return Matrix(weight, scales, biases, first.bits, first.group_size, rows([m.added for m in matrices]))


class Weights:
    """The tensors of an artifact, handed out once each as floats of one dtype. The files are read as tensors are evaluated."""

    def __init__(self, artifact: Artifact, dtype: mx.Dtype) -> None:
        self._where = artifact.path
        self._dtype = dtype
        self.config: Mapping[str, Any] = json.loads(artifact.text("config.json"))
        """The checkpoint's config.json, with MLX's `quantization`."""
        self._tensors: dict[str, mx.array] = {}
        for shard in artifact.manifest.weights.shards:
            loaded = mx.load(str(artifact.path / shard.file))
            assert isinstance(loaded, dict)
            self._tensors.update(loaded)
        mode = self._quantization().get("mode", "affine")
        if mode != "affine":
            raise ArtifactError(f"{self._where} is quantized as {mode!r}; nearfar runs affine weights. Build it again")

    def vector(self, name: str) -> mx.array:
        """A tensor that is never quantized."""
        return self._take(name)

    def matrix(self, name: str) -> Matrix:
        """The matrix of a layer called `name` (without ".weight")."""
        added = self._take(f"{name}.bias") if f"{name}.bias" in self._tensors else None
        if f"{name}.scales" not in self._tensors:
            return Matrix(self._take(f"{name}.weight"), added=added)
        settings: Any = self._quantization()
        settings = settings[name] if isinstance(settings.get(name), dict) else settings
        weight, scales, biases = (self._take(f"{name}.{part}") for part in ("weight", "scales", "biases"))
        return Matrix(weight, scales, biases, int(settings["bits"]), int(settings["group_size"]), added)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def finish(self) -> None:
        """Refuse tensors that nobody asked for: they would change what the model computes."""
        if self._tensors:
            raise ArtifactError(f"{self._where} has tensors that its architecture does not: {', '.join(sorted(self._tensors))}")

    def _quantization(self) -> Mapping[str, Any]:
        return self.config.get("quantization") or {}

    def _take(self, name: str) -> mx.array:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ArtifactError(f"{self._where} has no tensor {name}. Copy the artifact again, or build it again")
        return tensor if tensor.dtype == mx.uint32 else tensor.astype(self._dtype)
