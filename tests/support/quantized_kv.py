"""A quantized cache in NumPy: rows to codes with a scale and an offset a group, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.format.kv import BITS, group_size

Array = npt.NDArray[Any]


def parts(rows: Array, kv_dtype: str) -> dict[str, Array]:
    """Of rows [..., head_dim]: codes as words, scales and biases, as Executor.read_pages names them."""
    bits, head_dim = BITS[kv_dtype], rows.shape[-1]
    group = group_size(head_dim, bits)
    assert group is not None
    levels = np.float32(2**bits - 1)
    x = np.clip(rows.astype(np.float32), -65504, 65504).reshape(*rows.shape[:-1], -1, group)
    offset = x.min(-1).astype(np.float16)
    step = (x.max(-1) - offset.astype(np.float32)) * np.float32(1 / levels)
    scale = np.maximum(step, 0).astype(np.float16)
    wide = scale.astype(np.float32)[..., None]
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    with np.errstate(invalid="ignore"):
        at = np.clip((x - offset.astype(np.float32)[..., None]) * inverse + np.float32(0.5), 0, levels)
    codes = np.nan_to_num(at).astype(np.uint8).reshape(*rows.shape)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return {"codes": np.ascontiguousarray(codes).view(np.uint32), "scales": scale, "biases": offset}


def rows(parts: dict[str, Array], kv_dtype: str) -> Array:
    """The values [..., head_dim] that the parts stand for, float32."""
    held = np.ascontiguousarray(parts["codes"]).view(np.uint8)
    if BITS[kv_dtype] == 4:
        held = np.stack([held & 15, held >> 4], axis=-1).reshape(*held.shape[:-1], -1)
    scales, biases = (parts[name].astype(np.float32)[..., None] for name in ("scales", "biases"))
    grouped = held.reshape(*scales.shape[:-1], -1).astype(np.float32)
    return (grouped * scales + biases).reshape(held.shape)


def rounded(values: Array, kv_dtype: str) -> Array:
    """Values as a cache of this type has them."""
    if kv_dtype not in BITS:
        return values.astype(kv_dtype)
    return rows(parts(values, kv_dtype), kv_dtype)
