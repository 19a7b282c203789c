"""Reads four-bit floats as compressed-tensors packs them. `X.weight_packed` is uint8 [n, k/2], with the first
of a byte's two values in the low bits. nvfp4: `X.weight_scale` e4m3 [n, k/16], divided by
`X.weight_global_scale` float32 [1]. mxfp4: `X.weight_scale` uint8 [n, k/32], 2^(s - 127).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantized.affine import Affine, whole
from nearfar.build.weights.quantized.contract import RequiredTensor
from nearfar.build.weights.quantized.e2m1 import e2m1_affine
from nearfar.errors import CheckpointError

GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
"""Inputs that share a scale, by the name of the format."""


def fp4_wanted(kind: str, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
    """The tensors of a matrix [n, k]."""
    out = {f"{base}.weight_packed": RequiredTensor((n, whole(base, k, "inputs", 2)), ("uint8",))}
    groups = (n, whole(base, k, "inputs", GROUPS[kind]))
    if kind == "mxfp4-pack-quantized":
        return out | {f"{base}.weight_scale": RequiredTensor(groups, ("uint8", "float8_e8m0fnu"))}
    out[f"{base}.weight_scale"] = RequiredTensor(groups, ("float8_e4m3fn",))
    return out | {f"{base}.weight_global_scale": RequiredTensor((1,), ("float32",))}


def fp4_affine(checkpoint: Checkpoint, kind: str, base: str, start: int, stop: int) -> Affine:
    """Read rows as affine codes of five bits."""
    packed = np.asarray(checkpoint.read(f"{base}.weight_packed", start, stop), np.uint8)
    patterns = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)
    stored = checkpoint.read(f"{base}.weight_scale", start, stop)
    if kind == "mxfp4-pack-quantized":
        scales = stored.view(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        return e2m1_affine(patterns, scales)
    name = f"{base}.weight_global_scale"
    divisor = float(checkpoint.read(name).astype(np.float64)[0])
    if not divisor > 0:
        raise CheckpointError(
            f"tensor {name!r} is {divisor:g}, and scales are divided by it: download it again"
        )
    return e2m1_affine(patterns, (stored.astype(np.float64) / divisor).astype(np.float32))
