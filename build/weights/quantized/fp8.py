"""Weights in eight-bit floats with scales, as DeepSeek, Qwen, vLLM and FBGEMM have them: w = value · scale.

`X.weight` [n, k] float8 (e4m3 or e5m2) with one scale for the matrix, for each row, or for blocks of
`weight_block_size`: `X.weight_scale_inv` or `X.weight_scale`, multiplied whatever the name. A float8 has no
affine codes: such a checkpoint is quantized as one of bfloat16 is. Scales of activations (`X.input_scale`,
`X.activation_scale`) are for devices that multiply in eight bits, and are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import numpy as np

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import F32
from nearfar.build.weights.quantized.affine import Format, base_of
from nearfar.build.weights.quantized.contract import FLOATS, RequiredTensor, Shape
from nearfar.build.weights.quantized.settings import settings_of
from nearfar.step.config import ConfigReader

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SCALES = (*FLOATS, "float8_e8m0fnu")
ENDINGS = ("weight_scale_inv", "weight_scale")
OF_ACTIVATIONS = (
    r".*\.(input_scale|input_global_scale|activation_scale|input_scale_ub|k_scale|v_scale|output_scale)"
)
"""Patterns of tensors with scales of activations and caches, which we keep as floats."""

Block = tuple[int, int]


class Fp8(Format):
    """See nearfar.build.weights.quantized.contract.Quantized. `block`: rows and columns that share a scale;
    None: the shapes of the scales decide.
    """

    name = "fp8"

    def __init__(self, checkpoint: Checkpoint, block: Block | None) -> None:
        entries = checkpoint.entries
        found = [name for name, entry in entries.items() if entry.dtype.name in FLOAT8]
        super().__init__(checkpoint, dict.fromkeys(name for name in found if name.endswith(".weight")))
        self._block = block

    @staticmethod
    def of(checkpoint: Checkpoint) -> Fp8 | None:
        """Read a checkpoint with quant_method fp8 or fbgemm_fp8; None for others."""
        settings = settings_of(checkpoint, "fp8", "fbgemm_fp8")
        if settings is None:
            return None
        read = ConfigReader(settings, within="quantization_config.")
        read.choice("fmt", ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"), "e4m3")
        block = None
        if read.given("weight_block_size"):
            rows, columns = (int(size) for size in read.numbers("weight_block_size", 2, 1, 1 << 20))
            block = rows, columns
        return Fp8(checkpoint, block)

    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The tensors `weight` and its scale, under the name that the checkpoint has."""
        ending = self._ending(base)
        return {
            f"{base}.weight": RequiredTensor((n, k), FLOAT8),
            f"{base}.{ending}": wanted_scale(self.checkpoint, f"{base}.{ending}", n, k, self._block),
        }

    def harmless(self, plain: Mapping[str, Shape]) -> Collection[str]:
        """Tensors about activations."""
        return activations(self.checkpoint)

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """Rows as value times scale, float32."""
        base = base_of(tensor)
        return scaled(self.checkpoint, tensor, f"{base}.{self._ending(base)}", start, stop, self._block)

    def _ending(self, base: str) -> str:
        there = [ending for ending in ENDINGS if f"{base}.{ending}" in self.checkpoint.entries]
        return there[0] if there else ENDINGS[0 if self._block else 1]


def activations(checkpoint: Checkpoint) -> list[str]:
    """Tensors that hold scales of activations."""
    return [name for name in checkpoint.entries if re.fullmatch(OF_ACTIVATIONS, name)]


def wanted_scale(checkpoint: Checkpoint, name: str, n: int, k: int, block: Block | None) -> RequiredTensor:
    """The expected scales of a matrix [n, k]: one for each block, or, without blocks, one for the matrix or
    for each row, as the checkpoint has them.
    """
    if block is not None:
        return RequiredTensor((-(-n // block[0]), -(-k // block[1])), SCALES)
    entry = checkpoint.entries.get(name)
    shapes: tuple[Shape, ...] = ((), (1,), (1, 1), (n,), (n, 1))
    return RequiredTensor(entry.shape if entry is not None and entry.shape in shapes else (n, 1), SCALES)


def scaled(
    checkpoint: Checkpoint, tensor: str, scale: str, start: int, stop: int, block: Block | None
) -> F32:
    """Rows of a float8 matrix times their scales, float32."""
    values = checkpoint.read(tensor, start, stop).astype(np.float32)
    if block is not None:
        first = start // block[0]
        found = checkpoint.read(scale, first, -(-stop // block[0])).astype(np.float32)
        rows = np.arange(start, stop) // block[0] - first
        columns = np.arange(values.shape[1]) // block[1]
        return np.asarray(values * found[rows][:, columns], np.float32)
    count = int(np.prod(checkpoint.entries[scale].shape))
    found = checkpoint.read(scale).astype(np.float32).reshape(-1, 1)
    return np.asarray(values * (found if count == 1 else found[start:stop]), np.float32)
