"""Four-bit floats of experts, as gpt-oss has them (quant_method mxfp4; OCP Microscaling Formats, 2023).

`X_blocks` is uint8 [experts, n, k/32, 16], with the first of a byte's two values in the low bits; `X_scales`
is uint8 [experts, n, k/32], 2^(s - 127). The matrices are those of the unquantized tensor `X` [experts, k,
n], output by output. Affine codes of five bits hold them exactly (e2m1.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import ml_dtypes
import numpy as np

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import F32, Scheme
from nearfar.build.weights.quantized.affine import Affine
from nearfar.build.weights.quantized.contract import Carried, RequiredTensor, Shape, most_common, scheme_for
from nearfar.build.weights.quantized.e2m1 import E2M1_BITS, e2m1_affine
from nearfar.build.weights.quantized.settings import settings_of
from nearfar.format.scales import PAIRS, Scales

GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4:
    """See nearfar.build.weights.quantized.contract.Quantized. Tensors are named without a part: X."""

    name = "mxfp4"
    notes: tuple[str, ...] = ()

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        found = [name.removesuffix(BLOCKS) for name in checkpoint.entries if name.endswith(BLOCKS)]
        self.tensors: Mapping[str, Scheme | None] = {name: self._scheme(name) for name in found}

    @staticmethod
    def of(checkpoint: Checkpoint) -> Mxfp4 | None:
        """Read a checkpoint with quant_method mxfp4; None for others."""
        return None if settings_of(checkpoint, "mxfp4") is None else Mxfp4(checkpoint)

    @property
    def scheme(self) -> Scheme | None:
        """The most common scheme of the matrices."""
        return most_common(self.tensors.values())

    def kind(self, tensor: str) -> str:
        """The format's name."""
        return self.name

    def expected(self, plain: Mapping[str, Shape]) -> dict[str, RequiredTensor]:
        """Blocks and scales of the quantized tensors, and the plain tensors."""
        out: dict[str, RequiredTensor] = {}
        for name, shape in plain.items():
            if name not in self.tensors or len(shape) != 3:
                out[name] = RequiredTensor(shape)
                continue
            experts, k, n = shape
            out[f"{name}{BLOCKS}"] = RequiredTensor((experts, n, k // GROUP, GROUP // 2), ("uint8",))
            out[f"{name}{SCALES}"] = RequiredTensor((experts, n, k // GROUP), ("uint8",))
        return out

    def harmless(self, plain: Mapping[str, Shape]) -> Collection[str]:
        """No tensors."""
        return ()

    def entries(self, tensor: str) -> tuple[str, ...]:
        """Blocks and scales."""
        return f"{tensor}{BLOCKS}", f"{tensor}{SCALES}"

    def carry(self, tensor: str, start: int, stop: int, scales: Scales = PAIRS) -> Carried:
        """Rows of all experts' matrices, one below the other, as affine codes of five bits."""
        return self._affine(tensor, start, stop).carried(E2M1_BITS, tensor)

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """The dequantized rows."""
        return self._affine(tensor, start, stop).weights()

    def _affine(self, tensor: str, start: int, stop: int) -> Affine:
        rows = self.checkpoint.entries[f"{tensor}{BLOCKS}"].shape[1]
        first = start // rows
        inside = slice(start - first * rows, stop - first * rows)

        def read(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
            held = np.asarray(self.checkpoint.read(name, first, -(-stop // rows)), np.uint8)
            return held.reshape(-1, held.shape[2] * (held.shape[3] if held.ndim == 4 else 1))[inside]

        packed, stored = read(f"{tensor}{BLOCKS}"), read(f"{tensor}{SCALES}")
        patterns = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)
        return e2m1_affine(patterns, stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))

    def _scheme(self, tensor: str) -> Scheme | None:
        shape = self.checkpoint.entries[f"{tensor}{BLOCKS}"].shape
        return scheme_for(E2M1_BITS, GROUP, shape[2] * GROUP) if len(shape) == 4 else None
