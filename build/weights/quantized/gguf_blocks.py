"""Reads GGUF's block types: each has its own layout of codes and scales.

The layouts are those of ggml's `ggml-common.h` and `ggml-quants.c`. A row is a sequence of blocks of 32 or
256 weights; each function takes blocks as bytes [blocks, size] and gives codes [blocks, weights of a block],
scales and biases [blocks, groups] with w = scale · code + bias, exactly (float32 holds every product that
occurs: float16 times at most 8 bits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nearfar.build.weights.quantize import F32, Scheme
from nearfar.build.weights.quantized import gguf_grids
from nearfar.build.weights.quantized.affine import F16, Affine, Levels
from nearfar.build.weights.quantized.contract import scheme_for
from nearfar.build.weights.quantized.e2m1 import E2M1_BITS, e2m1_affine
from nearfar.format.scales import IQ4, OF_GGUF, PAIRS, SYMMETRIC, Scales

Bytes = npt.NDArray[Any]
"""Arrays of uint8; shifts lose the dtype in NumPy's annotations."""


@dataclass(frozen=True)
class Blocks:
    """A block type: the `bits` that hold its codes, groups of `group` weights, the function that reads it,
    and the way of storing scales that takes the bytes of the type.
    """

    bits: int
    group: int
    read: Callable[[Bytes], Affine]
    scales: Scales = PAIRS

    def scheme(self, k: int) -> Scheme | None:
        """The scheme that holds rows of k weights exactly."""
        found = scheme_for(self.bits, self.group, k)
        if found is None or found != Scheme(self.bits, self.group):
            return found
        exact = Scheme(self.bits, self.group, self.scales)
        return exact if exact.fits(k) else found


def _half(blocks: Bytes, at: int) -> F32:
    """Read the float16 at a byte of each block, as float32 [blocks, 1]."""
    return _float16(blocks, at).astype(np.float32)


def _float16(blocks: Bytes, at: int) -> F16:
    """Read the float16 at a byte of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _nibbles(packed: Bytes) -> Bytes:
    """Unpack nibbles […, m] to […, 2m]: first all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(words: Bytes) -> Bytes:
    """Unpack the bits of 4 bytes, lowest first: [blocks, 4] to [blocks, 32]."""
    return np.unpackbits(words, axis=-1, bitorder="little")


def _centred(codes: Bytes, scales: F32, zero: int) -> Affine:
    return Affine(codes, scales, scales * np.float32(-zero))


def _with_minima(codes: Bytes, scales: Bytes, minima: Bytes, unit: F16, least: F16) -> Affine:
    """Weights unit · scale · code − least · minimum; scales and minima are uint8 [blocks, groups]."""
    levels = Levels(scales, minima, np.concatenate([unit, least], axis=1))
    wide, below = unit.astype(np.float32), least.astype(np.float32)
    return Affine(codes, wide * scales, -below * minima, levels)


def _signed(codes: Bytes, scales: Bytes, bits: int, zero: int, unit: F16) -> Affine:
    """Weights unit · (scale − 2^(bits − 1)) · (code − zero); scales are uint8 [blocks, groups] of `bits`
    bits.
    """
    levels = Levels(scales, np.zeros_like(scales), np.concatenate([unit, np.zeros_like(unit)], axis=1))
    centred = scales.astype(np.float32) - np.float32(1 << (bits - 1))
    made = _centred(codes, unit.astype(np.float32) * centred, zero)
    return replace(made, levels=levels)


def _q4_0(b: Bytes) -> Affine:
    return _centred(_nibbles(b[:, 2:]), _half(b, 0), 8)


def _q4_1(b: Bytes) -> Affine:
    return Affine(_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2))


def _q5_0(b: Bytes) -> Affine:
    return _centred(_nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4, _half(b, 0), 16)


def _q5_1(b: Bytes) -> Affine:
    return Affine(_nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4, _half(b, 0), _half(b, 2))


def _q8_0(b: Bytes) -> Affine:
    return _centred(b[:, 2:] ^ 128, _half(b, 0), 128)


def _quarters(packed: Bytes, count: int) -> Bytes:
    """Unpack the two-bit codes of a block of 256 from 64 bytes [blocks, 64]: two halves of 32 bytes, each
    with four runs of 32 codes from the lowest bits up.
    """
    halves = packed.reshape(count, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (halves & 3).reshape(count, 256)


def _q2_k(b: Bytes) -> Affine:
    codes = _quarters(b[:, 16:80], len(b))
    return _with_minima(codes, b[:, :16] & 15, b[:, :16] >> 4, _float16(b, 80), _float16(b, 82))


def _q3_k(b: Bytes) -> Affine:
    high = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(b), 256)
    packed = b[:, 96:108]
    low = _nibbles(packed[:, :8])
    top = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(len(b), 16)
    codes = _quarters(b[:, 32:96], len(b)) | high << 2
    return _signed(codes, low | top << 4, 6, 4, _float16(b, 108))


def _six(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of six bits, from 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales, minima


def _q4_k(b: Bytes) -> Affine:
    scales, minima = _six(b[:, 4:16])
    codes = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(len(b), 256)
    return _with_minima(codes, scales, minima, _float16(b, 0), _float16(b, 2))


def _q5_k(b: Bytes) -> Affine:
    scales, minima = _six(b[:, 4:16])
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(b), 256)
    codes = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(len(b), 256) | high << 4
    return _with_minima(codes, scales, minima, _float16(b, 0), _float16(b, 2))


def _q6_k(b: Bytes) -> Affine:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(len(b), 256)
    codes = low | _quarters(b[:, 128:192], len(b)) << 4
    return _signed(codes, b[:, 192:208] ^ 128, 8, 32, _float16(b, 208))


def _iq4_nl(b: Bytes) -> Affine:
    return replace(_centred(_nibbles(b[:, 2:]), _half(b, 0), 0), table="iq4")


def _iq4_xs(b: Bytes) -> Affine:
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(len(b), 8)
    codes = _nibbles(b[:, 8:].reshape(-1, 8, 16)).reshape(len(b), 256)
    scales = (low | high << 4).astype(np.uint8)
    return replace(_signed(codes, scales, 6, 0, _float16(b, 0)), table="iq4")


def _mxfp4(b: Bytes) -> Affine:
    scales = np.ascontiguousarray(b[:, :1]).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return e2m1_affine(_nibbles(b[:, 1:]), scales)


BLOCKS: Mapping[str, Blocks] = {
    "Q4_0": Blocks(4, 32, _q4_0, SYMMETRIC),
    "Q4_1": Blocks(4, 32, _q4_1),
    "Q5_0": Blocks(5, 32, _q5_0, SYMMETRIC),
    "Q5_1": Blocks(5, 32, _q5_1),
    "Q8_0": Blocks(8, 32, _q8_0, SYMMETRIC),
    "Q2_K": Blocks(2, 16, _q2_k, OF_GGUF["Q2_K"]),
    "Q3_K": Blocks(3, 16, _q3_k, OF_GGUF["Q3_K"]),
    "Q4_K": Blocks(4, 32, _q4_k, OF_GGUF["Q4_K"]),
    "Q5_K": Blocks(5, 32, _q5_k, OF_GGUF["Q5_K"]),
    "Q6_K": Blocks(6, 16, _q6_k, OF_GGUF["Q6_K"]),
    "IQ4_NL": Blocks(4, 32, _iq4_nl, IQ4["IQ4_NL"]),
    "IQ4_XS": Blocks(4, 32, _iq4_xs, IQ4["IQ4_XS"]),
    "MXFP4": Blocks(E2M1_BITS, 32, _mxfp4),
    "TQ1_0": Blocks(2, 256, gguf_grids.tq1_0),
    "TQ2_0": Blocks(2, 256, gguf_grids.tq2_0),
    "IQ1_S": Blocks(2, 32, gguf_grids.iq1_s),
    "IQ1_M": Blocks(5, 16, gguf_grids.iq1_m),
    "IQ2_XXS": Blocks(8, 32, gguf_grids.iq2_xxs),
    "IQ2_XS": Blocks(8, 16, gguf_grids.iq2_xs),
    "IQ2_S": Blocks(8, 16, gguf_grids.iq2_s),
    "IQ3_XXS": Blocks(6, 32, gguf_grids.iq3_xxs),
    "IQ3_S": Blocks(4, 32, gguf_grids.iq3_s),
}
"""The quantized types, by ggml's names."""


def read_rows(kind: str, rows: Bytes, size: int) -> Affine:
    """Read rows uint8 [n, blocks · size] of a type as affine codes [n, k]."""
    n = rows.shape[0]
    found = BLOCKS[kind].read(np.ascontiguousarray(rows).reshape(-1, size))
    levels = found.levels and found.levels.reshape(n)
    codes, scales, biases = found.codes, found.scales, found.biases
    return Affine(codes.reshape(n, -1), scales.reshape(n, -1), biases.reshape(n, -1), levels, found.table)
