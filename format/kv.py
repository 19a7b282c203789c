"""How keys and values are stored: as floats, or as codes of 8 or 4 bits with a scale and an offset for each
group.

A quantized row, one position of one head, is `row_words` words of 32 bits: the codes, then for each group a
scale and an offset in float16. A value is code·scale + offset. How a page of such rows is laid out inside is
the target's affair (docs/artifact.md); how long it is, is told here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

Float = Literal["float16", "float32"]
"""What programs compute in."""
KvDtype = Literal["float16", "float32", "int8", "int4"]
"""What caches hold."""
BITS: dict[str, int] = {"int8": 8, "int4": 4}
"""Bits of a code, of the caches that are quantized."""
GROUPS: dict[str, tuple[int, ...]] = {"int8": (64, 32), "int4": (32,)}
"""Values that share a scale: the first that divides a head. 4 bits need the smaller groups."""
OF_BITS: dict[int, KvDtype] = {16: "float16", 8: "int8", 4: "int4"}
"""What options name by the bits of a value."""
OF_TARGET: dict[str, tuple[int, ...]] = dict.fromkeys(("cpu", "wasm", "webgpu", "vulkan"), (16, 8, 4))
"""The bits for which a target has programs; others have caches of floats alone. mlx needs none for it."""
ROUNDED: frozenset[str] = frozenset({"int4"})
"""Caches whose keys are stored by what a calibration has found of them (`rounding`)."""
UNIT = 32
"""Values that are stored together: heads that they do not divide cannot be quantized."""

Extent = TypeVar("Extent", int, int | str)


def group_size(head_dim: int, bits: int) -> int | None:
    """Values that share a scale, None where heads of head_dim values cannot be cut into groups."""
    return next((size for size in GROUPS[f"int{bits}"] if head_dim % size == 0), None)


def row_words(head_dim: int, kv_dtype: str) -> int:
    """Words of a quantized row; ValueError where its head cannot be quantized."""
    bits = BITS[kv_dtype]
    group = group_size(head_dim, bits)
    if group is None:
        raise ValueError(
            f"heads of {head_dim} values cannot be cut into groups of {UNIT}: no cache of {kv_dtype}"
        )
    return head_dim * bits // 32 + head_dim // group


def row_bytes(head_dim: int, kv_dtype: str) -> int:
    """Bytes of a row, of floats or quantized."""
    if kv_dtype in BITS:
        return 4 * row_words(head_dim, kv_dtype)
    return head_dim * (4 if kv_dtype == "float32" else 2)


def rounding(cache: int) -> str:
    """The weights by which keys of a cache in ROUNDED become codes, float32 [2, kv_heads, head_dim].

    First what is subtracted from each key: a constant, which changes no softmax. Then, of the key that is
    left, by how much the error of each component moves its group's offset, against it: so that what queries
    mostly look for is as it was (docs/decisions/0024).
    """
    return f"kv.{cache}.k.rounding"


def rows_of(shape: Sequence[Extent], kv_dtype: str) -> tuple[str, tuple[Extent, ...]]:
    """Dtype and shape of the buffer that holds a cache [pages, kv_heads, page_size, head_dim]."""
    if kv_dtype not in BITS:
        return kv_dtype, tuple(shape)
    *outer, head_dim = shape
    assert isinstance(head_dim, int)
    return "uint32", (*outer, row_words(head_dim, kv_dtype))
