"""How caches store keys and values: as floats, or as codes of 8 or 4 bits with a scale and an offset for each
group.

A quantized row (one position of one head) is `row_words` words of 32 bits: the codes, then for each group a
scale and an offset in float16. A value is code·scale + offset. Each target chooses the layout of rows within
a page (docs/artifact.md); this module alone fixes the length of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

Float = Literal["float16", "float32"]
"""Dtypes in which programs compute."""
KvDtype = Literal["float16", "float32", "int8", "int4"]
"""Dtypes that a cache can have."""
BITS: dict[str, int] = {"int8": 8, "int4": 4}
"""Bits of a code, by the dtype of a quantized cache."""
GROUPS: dict[str, tuple[int, ...]] = {"int8": (64, 32), "int4": (32,)}
"""Sizes of groups that share a scale, by dtype: the first that divides head_dim is used. 4 bits need the
smaller groups.
"""
OF_BITS: dict[int, KvDtype] = {16: "float16", 8: "int8", 4: "int4"}
"""The dtype that an option means by a number of bits."""
OF_TARGET: dict[str, tuple[int, ...]] = dict.fromkeys(("cpu", "wasm", "webgpu", "vulkan"), (16, 8, 4))
"""Bits of a cached value for which a target has programs; other targets cache floats only. mlx
quantizes the cache of any program.
"""
ROUNDED: frozenset[str] = frozenset({"int4"})
"""Dtypes of caches whose keys are stored with weights from calibration (`rounding`)."""
UNIT = 32
"""Values of a smallest group: a head can be quantized only if its length is a multiple."""

Extent = TypeVar("Extent", int, int | str)


def group_size(head_dim: int, bits: int) -> int | None:
    """Values that share a scale; None if head_dim cannot be divided into groups."""
    return next((size for size in GROUPS[f"int{bits}"] if head_dim % size == 0), None)


def row_words(head_dim: int, kv_dtype: str) -> int:
    """Words of 32 bits in a quantized row; ValueError if a head of this length cannot be quantized."""
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
    """The name of the tensor with the weights by which keys of a cache in ROUNDED become codes.

    It is float32 [2, kv_heads, head_dim]. The first vector is subtracted from each key: a constant that
    changes no softmax. The second says how much the rounding error of each component moves its group's offset
    in the opposite direction, so that the directions that queries weigh most keep their value
    (docs/decisions/0024).
    """
    return f"kv.{cache}.k.rounding"


def rows_of(shape: Sequence[Extent], kv_dtype: str) -> tuple[str, tuple[Extent, ...]]:
    """Dtype and shape of the buffer that holds a cache of shape [pages, kv_heads, page_size, head_dim]."""
    if kv_dtype not in BITS:
        return kv_dtype, tuple(shape)
    *outer, head_dim = shape
    assert isinstance(head_dim, int)
    return "uint32", (*outer, row_words(head_dim, kv_dtype))
