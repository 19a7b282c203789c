"""Converts pages of a quantized cache between the kernels' form and the form of `read_pages`.

The kernels' order (docs/artifact.md, "A quantized cache") suits vector loads. The executor's interface uses
MLX's order: the codes of each position's components in turn, the first in a word's low bits. `innermost`:
words of keys on cpu and wasm, which have positions innermost; all other words are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.format import buffers
from nearfar.format.kv import BITS, UNIT, group_size, row_words
from nearfar.format.manifest import Manifest, Program

Array = npt.NDArray[Any]
PARTS = ("codes", "scales", "biases")


def quantized(manifest: Manifest, program: Program) -> dict[str, int]:
    """The head dimension of each quantized cache buffer of a program, by name; empty for a
    cache of floats.
    """
    if program.kv_dtype not in BITS:
        return {}
    return {
        name: cache.head_dim
        for i, cache in enumerate(manifest.caches)
        for name in (buffers.keys(i), buffers.values(i))
    }


def shapes(
    words: tuple[int, ...], head_dim: int, kv_dtype: str
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """The shape and dtype of codes, scales and biases for pages of words of shape `words`."""
    bits, outer = BITS[kv_dtype], words[:-1]
    half = ((*outer, _groups(head_dim, bits)), np.dtype(np.float16))
    return {
        "codes": ((*outer, head_dim * bits // 32), np.dtype(np.uint32)), "scales": half, "biases": half,
    }  # fmt: skip


def parts_of(pages: Array, head_dim: int, kv_dtype: str, *, innermost: bool) -> dict[str, Array]:
    """Split pages of words [n, kv_heads, page_size, row_words] into codes, scales and biases.

    Codes are uint32 [n, kv_heads, page_size, head_dim·bits/32]; scales and biases float16 [n, kv_heads,
    page_size, groups].
    """
    bits, (n, heads, size, _) = BITS[kv_dtype], pages.shape
    row, groups = head_dim * bits // 8, _groups(head_dim, bits)
    flat = np.ascontiguousarray(pages).view(np.uint8).reshape(n, heads, -1)
    held, pairs = flat[..., : size * row], np.ascontiguousarray(flat[..., size * row :]).view(np.float16)
    if innermost:
        codes = held.reshape(n, heads, row, size).swapaxes(2, 3)
        both = pairs.reshape(n, heads, groups, 2, size).transpose(3, 0, 1, 4, 2)
    else:
        codes = held.reshape(n, heads, size, row)
        both = pairs.reshape(n, heads, size, groups, 2).transpose(4, 0, 1, 2, 3)
    if bits == 4:
        half = codes.reshape(n, heads, size, head_dim // UNIT, UNIT // 2)
        each = np.concatenate([half & 15, half >> 4], axis=-1)
        codes = (each[..., ::2] | each[..., 1::2] << 4).reshape(n, heads, size, row)
    words = np.ascontiguousarray(codes).view(np.uint32)
    scales, biases = both
    return dict(zip(PARTS, (words, scales, biases), strict=True))


def pages_of(parts: Mapping[str, Array], kv_dtype: str, *, innermost: bool) -> Array:
    """Join parts as `parts_of` returns them to pages of words."""
    bits, codes = BITS[kv_dtype], np.ascontiguousarray(parts["codes"], np.uint32)
    n, heads, size, words = codes.shape
    head_dim = words * 32 // bits
    held = codes.view(np.uint8)
    if bits == 4:
        each = np.stack([held & 15, held >> 4], axis=-1).reshape(n, heads, size, -1, 2, UNIT // 2)
        held = (each[..., 0, :] | each[..., 1, :] << 4).reshape(n, heads, size, -1)
    both = np.stack([parts["scales"], parts["biases"]], axis=-1).astype(np.float16)
    if innermost:
        held, both = held.swapaxes(2, 3), both.transpose(0, 1, 3, 4, 2)
    flat = [
        np.ascontiguousarray(held).reshape(n, heads, -1),
        np.ascontiguousarray(both).reshape(n, heads, -1).view(np.uint8),
    ]
    shape = (n, heads, size, row_words(head_dim, kv_dtype))
    return np.concatenate(flat, axis=-1).view(np.uint32).reshape(shape)


def _groups(head_dim: int, bits: int) -> int:
    group = group_size(head_dim, bits)
    assert group is not None  # the build makes no program with a quantized cache without a group size
    return head_dim // group
