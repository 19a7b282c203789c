"""A quantized cache in NumPy: converts rows to codes with a scale and an offset for each group, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.format.kv import BITS, group_size

Array = npt.NDArray[Any]


def parts(rows: Array, kv_dtype: str, weights: Array | None = None) -> dict[str, Array]:
    """Codes as words, scales and biases of rows [..., head_dim], as Executor.read_pages names them.

    `weights`, as wide as rows: the weights by which rounding errors move the biases
    (nearfar.format.kv.rounding).
    """
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
    if weights is not None:
        left = x - (codes.reshape(x.shape) * wide + offset.astype(np.float32)[..., None])
        moved = offset + (left * np.broadcast_to(weights, rows.shape).reshape(x.shape)).sum(-1)
        offset = np.clip(moved, -65504, 65504).astype(np.float16)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return {"codes": np.ascontiguousarray(codes).view(np.uint32), "scales": scale, "biases": offset}


def rows(parts: dict[str, Array], kv_dtype: str) -> Array:
    """Dequantize the parts to float32 [..., head_dim]."""
    held = np.ascontiguousarray(parts["codes"]).view(np.uint8)
    if BITS[kv_dtype] == 4:
        held = np.stack([held & 15, held >> 4], axis=-1).reshape(*held.shape[:-1], -1)
    scales, biases = (parts[name].astype(np.float32)[..., None] for name in ("scales", "biases"))
    grouped = held.reshape(*scales.shape[:-1], -1).astype(np.float32)
    return (grouped * scales + biases).reshape(held.shape)


def rounded(values: Array, kv_dtype: str, weights: Array | None = None) -> Array:
    """Round values as a cache of this dtype does."""
    if kv_dtype not in BITS:
        return values.astype(kv_dtype)
    return rows(parts(values, kv_dtype, weights), kv_dtype)


def check(
    got: Array, want: Array, before: Array, kv_dtype: str, weights: Array | None = None, alike: float = 0.9
) -> None:
    """Check a cache against the codes of `want`. A code may be off by one, because sums in another order can
    fall on the other side of the middle of two codes. Of the rows that differ from `before`, at least the
    share `alike` must match exactly, so that an error of a whole group is noticed.
    """
    made = parts(want, kv_dtype, weights)
    step = np.repeat(made["scales"].astype(np.float64), want.shape[-1] // made["scales"].shape[-1], axis=-1)
    numbers = rows(made, kv_dtype)
    assert (np.isnan(got) == np.isnan(numbers)).all()
    apart = np.nan_to_num(np.abs(got - numbers))
    most = 1.01 + (0.0 if weights is None else float(np.abs(weights).max()))
    assert (apart <= most * np.nan_to_num(step) + 1e-6).all()
    written = (want != before).any(-1)
    assert (apart <= 0.05 * step + 1e-6)[written].mean() > alike
