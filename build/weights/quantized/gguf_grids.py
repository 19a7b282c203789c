"""Reads GGUF's block types of one to three bits: TQ1, TQ2, IQ1, IQ2 and IQ3.

The layouts are those of ggml's `ggml-common.h` and `ggml-quants.c`. Codes of the IQ types are indices into
tables of a few weights, which are a part of the format (gguf_grids.json, scripts/freeze_grids.py). All
weights of a group are whole multiples of one number, so codes hold them exactly; where the multiples are not
consecutive, the codes have more bits than the file.
"""

from __future__ import annotations

import base64
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.quantize import F32
from nearfar.build.weights.quantized.affine import Affine

Bytes = npt.NDArray[Any]
"""Arrays of unsigned integers; shifts lose the dtype in NumPy's annotations."""

TABLES = Path(__file__).with_name("gguf_grids.json")
BITS = np.arange(8, dtype=np.uint8)
QUARTER, HALF, EIGHTH = np.float32(0.25), np.float32(0.5), np.float32(0.125)


@functools.cache
def grid(name: str) -> npt.NDArray[np.int16]:
    """The table of a type: [entries, weights of an entry]."""
    table = json.loads(TABLES.read_text(encoding="utf-8"))[name]
    packed = np.frombuffer(base64.b64decode(table["places"]), np.uint8)
    places = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, table["width"])
    return np.asarray(np.array(table["values"], np.int16)[places], np.int16)


@functools.cache
def _signs() -> Bytes:
    """The eight signs that seven bits stand for: the eighth makes the number of minus signs even."""
    index = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(index[:, None], axis=1).sum(axis=1).astype(np.uint8) & 1
    return np.asarray(index | parity << 7, np.uint8)


def _half(blocks: Bytes, at: int) -> F32:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _words(blocks: Bytes, start: int, stop: int, dtype: str) -> Bytes:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _nibbles(packed: Bytes) -> Bytes:
    """Unpack nibbles, the low one of each byte first: [blocks, m] to [blocks, 2m]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _signed(weights: npt.NDArray[np.int16], signs: Bytes) -> npt.NDArray[np.int16]:
    """Weights [blocks, 256] with the sign of each bit of signs [blocks, 32], lowest first."""
    negative = (signs[..., None] >> BITS & 1).reshape(weights.shape).astype(bool)
    out: npt.NDArray[np.int16] = np.where(negative, -weights, weights).astype(np.int16)
    return out


def _seven(words: Bytes) -> Bytes:
    """The signs of 32 weights, four times seven bits of a word: [blocks, 8] to [blocks, 32]."""
    index = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    return np.asarray(_signs()[index].reshape(len(words), -1))


def _taken(name: str, index: Bytes) -> npt.NDArray[np.int16]:
    """The entries of a table, side by side: [blocks, entries] to [blocks, 256]."""
    return grid(name)[index].reshape(len(index), -1)


def _centred(weights: npt.NDArray[np.int16], scales: F32, zero: int) -> Affine:
    """Weights from −zero to zero, times `scales`."""
    return Affine((weights + zero).astype(np.uint8), scales, scales * np.float32(-zero))


def tq1_0(b: Bytes) -> Affine:
    """Five ternary digits a byte, as a fraction of 256; the last four bytes hold four."""
    parts = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([1, 3, 9, 27, 81][:digits], np.uint8)
        parts.append((b[:, None, start:stop] * powers[:, None]).reshape(len(b), -1))
    codes = (np.concatenate(parts, axis=1).astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return Affine(codes, _half(b, 52), -_half(b, 52))


def tq2_0(b: Bytes) -> Affine:
    """Two bits a ternary digit: two halves of 32 bytes, each with four runs of 32 digits."""
    halves = b[:, :64].reshape(len(b), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = np.asarray((halves & 3).reshape(len(b), 256), np.uint8)
    return Affine(codes, _half(b, 64), -_half(b, 64))


def iq2_xxs(b: Bytes) -> Affine:
    """Groups of 32: four indices, then the signs and the scale in one word."""
    words = _words(b, 2, 66, "<u4").reshape(len(b), 8, 2)
    index = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(len(b), 32)
    scales = _half(b, 0) * (HALF + (words[..., 1] >> 28).astype(np.float32)) * QUARTER
    return _centred(_signed(_taken("IQ2_XXS", index), _seven(words[..., 1])), scales, 43)


def iq2_xs(b: Bytes) -> Affine:
    """Groups of 16: nine bits of an index and seven of signs in each word."""
    words = _words(b, 2, 66, "<u2")
    scales = _half(b, 0) * (HALF + _nibbles(b[:, 66:]).astype(np.float32)) * QUARTER
    return _centred(_signed(_taken("IQ2_XS", words & 511), _signs()[words >> 9]), scales, 43)


def iq2_s(b: Bytes) -> Affine:
    """Groups of 16: indices of ten bits, a byte for eight signs."""
    high = (b[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(b), 32)
    index = b[:, 2:34] | high.astype(np.uint16) << 8
    scales = _half(b, 0) * (HALF + _nibbles(b[:, 74:]).astype(np.float32)) * QUARTER
    return _centred(_signed(_taken("IQ2_S", index), b[:, 34:66]), scales, 43)


def iq3_xxs(b: Bytes) -> Affine:
    """Groups of 32: an index for four weights; all weights are even, so half of each is its code."""
    words = _words(b, 66, 98, "<u4")
    scales = _half(b, 0) * (HALF + (words >> 28).astype(np.float32))
    return _centred(_signed(_taken("IQ3_XXS", b[:, 2:66]) // 2, _seven(words)), scales, 31)


def iq3_s(b: Bytes) -> Affine:
    """Groups of 32: indices of nine bits; all weights are odd, from −15 to 15: sixteen in a row."""
    high = (b[:, 66:74, None] >> BITS & 1).reshape(len(b), 64)
    index = b[:, 2:66] | high.astype(np.uint16) << 8
    scales = _half(b, 0) * (1 + 2 * _nibbles(b[:, 106:]).astype(np.float32))
    weights = _signed(_taken("IQ3_S", index), b[:, 74:106])
    return Affine(((weights + 15) // 2).astype(np.uint8), 2 * scales, -15 * scales)


def iq1_s(b: Bytes) -> Affine:
    """Groups of 32: ternary weights, all moved by an eighth up or down."""
    words = _words(b, 34, 50, "<u2")
    high = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), 32)
    codes = (_taken("IQ1_S", b[:, 2:34] | high << 8) + 1).astype(np.uint8)
    scales = _half(b, 0) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    moved = np.where(words & 0x8000, -EIGHTH, EIGHTH)
    return Affine(codes, scales, scales * (moved - np.float32(1)))


def iq1_m(b: Bytes) -> Affine:
    """Groups of 16 ternary weights, each half of which is moved by an eighth up or down: the weights are
    multiples of an eighth of the scale. The bits of the scale are spread over the block.
    """
    words = _words(b, 48, 56, "<u2")
    whole = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=1)
    half = np.ascontiguousarray(whole).view("<f2").astype(np.float32)[:, None]
    steps = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), 16)
    high = _nibbles(b[:, 32:48])
    weights = grid("IQ1_S")[b[:, :32] | (high & 7).astype(np.uint16) << 8] * 8
    moved = np.where(high & 8, -1, 1).astype(np.int16)[..., None]
    scales = half * (2 * steps + 1).astype(np.float32) * EIGHTH
    return _centred((weights + moved).reshape(len(b), 256), scales, 9)
