"""Reads checkpoints of `mlx_lm.convert -q` and of our own mlx target.

config.json has bits, group size and mode under `quantization`, and a module's own settings under its name. A
quantized matrix X is `X.weight` (uint32, codes.py) with `X.scales`. Mode affine, like our layout, also has
`X.biases`. The other modes are floats: mxfp4 (four bits e2m1, a scale 2^(s - 127) for 32), nvfp4 (a scale
e4m3 for 16), mxfp8 (e4m3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import ml_dtypes
import numpy as np

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import F32, Scheme
from nearfar.build.weights.quantized.affine import Affine, AffineFormat, base_of, near
from nearfar.build.weights.quantized.contract import Carried, RequiredTensor
from nearfar.build.weights.quantized.e2m1 import E2M1_BITS, e2m1_affine
from nearfar.errors import CheckpointError
from nearfar.format.scales import CODE_BITS, PAIRS, Scales
from nearfar.kernels.codes import unpack_codes
from nearfar.kernels.quantized import QuantTensor

Mode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]
SETTINGS = ("group_size", "bits", "mode")
GROUPS = (32, 64, 128)
FIXED: dict[str, tuple[int, int]] = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Bits and group size of the modes in which these are fixed."""
OURS = (
    f"use a checkpoint with bits {', '.join(map(str, CODE_BITS))}, "
    f"group_size {', '.join(map(str, GROUPS))} and mode affine, or one of mode "
    "mxfp4, nvfp4 or mxfp8, or the unquantized original"
)


@dataclass(frozen=True)
class MatrixSetting:
    """The settings of a matrix: mode, bits and group size."""

    bits: int
    group: int
    mode: Mode = "affine"

    @property
    def scheme(self) -> Scheme | None:
        """The scheme that holds the codes exactly; None where none does."""
        if self.mode == "affine":
            return Scheme(self.bits, self.group)
        return Scheme(E2M1_BITS, self.group) if self.bits == 4 else None


class Mlx(AffineFormat):
    """See nearfar.build.weights.quantized.contract.Quantized."""

    name = "MLX"

    def __init__(
        self, checkpoint: Checkpoint, common: MatrixSetting, settings: Mapping[str, MatrixSetting]
    ) -> None:
        super().__init__(checkpoint, {f"{base}.weight": own.scheme for base, own in settings.items()})
        self._common, self._settings = common, settings

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of matrices without a setting of their own."""
        return self._common.scheme

    @staticmethod
    def of(checkpoint: Checkpoint) -> Mlx | None:
        """Read a checkpoint with MLX's settings in config.json, else None. Raises CheckpointError for
        unsupported settings.
        """
        config = checkpoint.config
        settings = config.get("quantization") or config.get("quantization_config")
        if not isinstance(settings, Mapping) or not {"bits", "group_size"} <= settings.keys():
            return None
        if "quant_method" in settings:
            return None
        common = _setting("quantization", settings)
        own = {
            layer: _setting(layer, {"mode": common.mode, **setting})
            for layer, setting in settings.items()
            if isinstance(setting, Mapping)
        }
        layers = [name.removesuffix(".scales") for name in checkpoint.entries if name.endswith(".scales")]
        return Mlx(checkpoint, common, {layer: own.get(layer, common) for layer in layers})

    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The tensors `weight`, `scales` and, in mode affine, `biases`."""
        own = self._settings[base]
        out = {f"{base}.weight": RequiredTensor((n, k * own.bits // 32), ("uint32",))}
        groups = (n, k // own.group)
        if own.mode != "affine":
            return out | {f"{base}.scales": RequiredTensor(groups, ("uint8",))}
        return out | {f"{base}.scales": RequiredTensor(groups), f"{base}.biases": RequiredTensor(groups)}

    def affine(self, base: str, start: int, stop: int) -> Affine:
        """The unpacked codes, or in the modes of e2m1 the affine codes of its values."""
        own = self._settings[base]
        words = np.asarray(self.checkpoint.read(f"{base}.weight", start, stop), np.uint32)
        codes = unpack_codes(words, own.bits)
        scales = self.checkpoint.read(f"{base}.scales", start, stop)
        if own.mode == "affine":
            biases = self.checkpoint.read(f"{base}.biases", start, stop)
            return Affine(codes, scales.astype(np.float32), biases.astype(np.float32))
        return e2m1_affine(codes, _scales(scales.view(np.uint8), own.mode))

    def carry(self, tensor: str, start: int, stop: int, scales: Scales = PAIRS) -> Carried:
        """The rows with the checkpoint's codes; in mode affine the words are copied unchanged."""
        base = base_of(tensor)
        own = self._settings[base]
        if own.mode != "affine":
            return super().carry(tensor, start, stop)
        words = np.asarray(self.checkpoint.read(tensor, start, stop), np.uint32)
        wide = [
            self.checkpoint.read(f"{base}.{part}", start, stop).astype(np.float32)
            for part in ("scales", "biases")
        ]
        half, change, rounded = near(wide[0], wide[1], own.bits, tensor)
        return Carried(QuantTensor(words, *half, own.bits), change, rounded)

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """The dequantized rows, in any mode."""
        base = base_of(tensor)
        if self._settings[base].mode != "mxfp8":
            return super().weights(tensor, start, stop)
        words = self.checkpoint.read(tensor, start, stop)
        values = words.view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        scales = _scales(self.checkpoint.read(f"{base}.scales", start, stop).view(np.uint8), "mxfp8")
        return np.asarray(values * np.repeat(scales, 32, axis=1), np.float32)


def _scales(stored: Any, mode: Mode) -> F32:
    """Convert the scales of a float mode, uint8 [n, groups], to float32."""
    kind = ml_dtypes.float8_e4m3fn if mode == "nvfp4" else ml_dtypes.float8_e8m0fnu
    return np.asarray(stored.view(kind).astype(np.float32), np.float32)


def _setting(where: str, settings: Mapping[str, Any]) -> MatrixSetting:
    bits, group, mode = settings.get("bits"), settings.get("group_size"), settings.get("mode", "affine")
    if _is_fixed(mode) and (bits, group) == FIXED[mode]:
        return MatrixSetting(*FIXED[mode], mode)
    if mode != "affine" or type(bits) is not int or bits not in CODE_BITS or group not in GROUPS:
        raise CheckpointError(f"config.json: {where} has {_show(settings)}, which is not read: {OURS}")
    return MatrixSetting(bits, int(group))


def _is_fixed(mode: object) -> TypeGuard[Literal["mxfp4", "nvfp4", "mxfp8"]]:
    return isinstance(mode, str) and mode in FIXED


def _show(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {settings[key]!r}" for key in SETTINGS if key in settings)
