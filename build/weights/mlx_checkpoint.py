"""Checkpoints that are quantized already, in MLX's layout: what `mlx_lm.convert -q` and our own mlx target
write.

config.json names bits and group size under `quantization`; a quantized matrix X is `X.weight` (uint32,
codes.py), with `X.scales` and `X.biases` [n, k/group]. We keep the codes, and so the weights, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.checkpoint import Checkpoint
from nearfar.build.weights.quantize import LARGEST, Scheme, to_float32
from nearfar.errors import CheckpointError
from nearfar.targets.codes import BITS
from nearfar.targets.quantized import Array, QuantTensor

SETTINGS = ("group_size", "bits", "mode")
GROUPS = (32, 64, 128)
OURS = (
    f"use a checkpoint with bits {', '.join(map(str, BITS))}, group_size {', '.join(map(str, GROUPS))} and "
    "mode affine, or the unquantized original"
)


@dataclass(frozen=True)
class MlxQuantized:
    """The quantization of such a checkpoint. `scheme`: of what has no setting of its own; `tensors`:
    X.weight of each.
    """

    scheme: Scheme
    tensors: Mapping[str, Scheme]

    @staticmethod
    def of(checkpoint: Checkpoint) -> MlxQuantized | None:
        """Read config.json; None where the weights are not quantized, CheckpointError where they are in a
        way not read.
        """
        config = checkpoint.config
        settings = config.get("quantization") or config.get("quantization_config")
        if not settings:
            return None
        if not isinstance(settings, Mapping) or not {"bits", "group_size"} <= settings.keys():
            method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
            raise CheckpointError(
                f"config.json: the weights are quantized by {method!r}, which is not read: {OURS}"
            )
        scheme = _scheme("quantization", settings)
        own = {
            layer: _scheme(layer, setting)
            for layer, setting in settings.items()
            if isinstance(setting, Mapping)
        }
        layers = [name.removesuffix(".scales") for name in checkpoint.entries if name.endswith(".scales")]
        return MlxQuantized(scheme, {f"{layer}.weight": own.get(layer, scheme) for layer in layers})

    def joint(self, tensors: Iterable[str]) -> Scheme:
        """What holds the codes of all these tensors as they are: the most bits, the smallest group."""
        found = [self.tensors[name] for name in tensors]
        return Scheme(max(scheme.bits for scheme in found), min(scheme.group_size for scheme in found))

    def expected(self, plain: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, for the shapes that the matrices have before quantization."""
        out: dict[str, tuple[int, ...]] = {}
        for name, shape in plain.items():
            if name not in self.tensors or len(shape) != 2:
                out[name] = shape
                continue
            (n, k), base, scheme = shape, name.removesuffix(".weight"), self.tensors[name]
            out[name] = (n, k * scheme.bits // 32)
            out[f"{base}.scales"] = out[f"{base}.biases"] = (n, k // scheme.group_size)
        return out

    def read(self, checkpoint: Checkpoint, name: str, start: int, stop: int) -> tuple[QuantTensor, int]:
        """Rows [start, stop) of a quantized matrix, and how many of its scales and biases float16 cannot
        hold exactly.
        """
        base = name.removesuffix(".weight")
        words = checkpoint.read(name, start, stop)
        if words.dtype != np.uint32:
            raise CheckpointError(
                f"tensor {name!r} has dtype {words.dtype.name}, where MLX packs codes in uint32"
            )
        affine, rounded = [], 0
        for part in ("scales", "biases"):
            half, inexact = _float16(checkpoint.read(f"{base}.{part}", start, stop), f"{base}.{part}")
            affine.append(half)
            rounded += inexact
        return QuantTensor(
            np.asarray(words, np.uint32), affine[0], affine[1], self.tensors[name].bits
        ), rounded


def _scheme(where: str, settings: Mapping[str, Any]) -> Scheme:
    bits, group, mode = settings.get("bits"), settings.get("group_size"), settings.get("mode", "affine")
    if mode != "affine" or bits not in BITS or group not in GROUPS:
        raise CheckpointError(f"config.json: {where} has {_show(settings)}, which is not read: {OURS}")
    return Scheme(int(bits), int(group))


def _show(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {settings[key]!r}" for key in SETTINGS if key in settings)


def _float16(array: Array, name: str) -> tuple[npt.NDArray[np.float16], int]:
    """The nearest float16 values, and how many differ from what was given."""
    wide = to_float32(array)
    if not np.isfinite(wide).all() or float(np.abs(wide).max(initial=0.0)) > LARGEST:
        raise CheckpointError(
            f"tensor {name!r} holds values that are not finite or beyond float16 (65504), in which scales "
            "and biases are stored: convert the original checkpoint again"
        )
    half = wide.astype(np.float16)
    return half, int(np.count_nonzero(half.astype(np.float32) != wide))
