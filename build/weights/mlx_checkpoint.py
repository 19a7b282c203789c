"""Checkpoints that are quantized already, in MLX's layout: what `mlx_lm.convert -q` and our own mlx target write.

config.json names bits and group size under `quantization`; a quantized matrix X is `X.weight` (uint32, codes.py), with
`X.scales` and `X.biases` [n, k/group]. We keep the codes, and so the weights, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.checkpoint import Checkpoint
from nearfar.build.weights.quantize import LARGEST, Scheme, to_float32
from nearfar.errors import CheckpointError
from nearfar.targets.quantized import Array, QuantTensor

SETTINGS = ("group_size", "bits", "mode")
OURS = "use a checkpoint with bits 2, 3, 4 or 8, group_size 32 or 64 and mode affine, or the unquantized original"


@dataclass(frozen=True)
class MlxQuantized:
    """The quantization of such a checkpoint; one setting for all of its matrices."""

    scheme: Scheme
    tensors: frozenset[str]  # names (X.weight) of the quantized matrices

    @staticmethod
    def of(checkpoint: Checkpoint) -> MlxQuantized | None:
        """Read config.json; None where the weights are not quantized, CheckpointError where they are in a way not read."""
        config = checkpoint.config
        settings = config.get("quantization") or config.get("quantization_config")
        if not settings:
            return None
        if not isinstance(settings, Mapping) or not {"bits", "group_size"} <= settings.keys():
            method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
            raise CheckpointError(f"config.json: the weights are quantized by {method!r}, which is not read: {OURS}")
        scheme = _scheme("quantization", settings)
        for layer, setting in settings.items():
            if isinstance(setting, Mapping) and _scheme(layer, setting) != scheme:
                raise CheckpointError(
                    f"config.json: quantization of {layer} is {_show(setting)}, elsewhere {_show(settings)}: nearfar "
                    "reads checkpoints with one setting for all matrices; convert the original without per-layer settings"
                )
        scales = [name for name in checkpoint.entries if name.endswith(".scales")]
        return MlxQuantized(scheme, frozenset(f"{name.removesuffix('.scales')}.weight" for name in scales))

    def expected(self, plain: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, for the shapes that the matrices have before quantization."""
        out: dict[str, tuple[int, ...]] = {}
        for name, shape in plain.items():
            if name not in self.tensors or len(shape) != 2:
                out[name] = shape
                continue
            (n, k), base = shape, name.removesuffix(".weight")
            out[name] = (n, k * self.scheme.bits // 32)
            out[f"{base}.scales"] = out[f"{base}.biases"] = (n, k // self.scheme.group_size)
        return out

    def read(self, checkpoint: Checkpoint, name: str, start: int, stop: int) -> tuple[QuantTensor, int]:
        """Rows [start, stop) of a quantized matrix, and how many of its scales and biases float16 cannot hold exactly."""
        base = name.removesuffix(".weight")
        words = checkpoint.read(name, start, stop)
        if words.dtype != np.uint32:
            raise CheckpointError(f"tensor {name!r} has dtype {words.dtype.name}, where MLX packs codes in uint32")
        affine, rounded = [], 0
        for part in ("scales", "biases"):
            half, inexact = _float16(checkpoint.read(f"{base}.{part}", start, stop), f"{base}.{part}")
            affine.append(half)
            rounded += inexact
        return QuantTensor(np.asarray(words, np.uint32), affine[0], affine[1], self.scheme.bits), rounded


def _scheme(where: str, settings: Mapping[str, Any]) -> Scheme:
    bits, group, mode = settings.get("bits"), settings.get("group_size"), settings.get("mode", "affine")
    if mode != "affine" or bits not in (2, 3, 4, 8) or group not in (32, 64):
        raise CheckpointError(f"config.json: {where} has {_show(settings)}, which is not read: {OURS}")
    return Scheme(int(bits), int(group))


def _show(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {settings[key]!r}" for key in SETTINGS if key in settings)


def _float16(array: Array, name: str) -> tuple[npt.NDArray[np.float16], int]:
    """The nearest float16 values, and how many differ from what was given."""
    wide = to_float32(array)
    if not np.isfinite(wide).all() or float(np.abs(wide).max(initial=0.0)) > LARGEST:
        raise CheckpointError(
            f"tensor {name!r} holds values that are not finite or beyond float16 (65504), in which scales and biases are "
            "stored: convert the original checkpoint again"
        )
    half = wide.astype(np.float16)
    return half, int(np.count_nonzero(half.astype(np.float32) != wide))
