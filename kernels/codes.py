"""Quantized codes as MLX packs them: `bits` words hold 32 codes, the first code in the low bits of the first
word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]


def holds(k: int, bits: int) -> bool:
    """Whether rows of k codes can be packed: into whole words, and, if a code can cross two words, in whole
    runs of 32 codes.
    """
    return k * bits % 32 == 0 if 8 % bits == 0 else k % 32 == 0


def pack_codes(codes: U8, bits: int) -> U32:
    """Pack codes uint8 [n, k] into words uint32 [n, k*bits/32]; `holds(k, bits)` must be true."""
    n, k = codes.shape
    if 8 % bits == 0:
        step = 8 // bits
        packed = codes[:, 0::step].copy()
        for i in range(1, step):
            packed |= codes[:, i::step] << np.uint8(i * bits)
        return packed.view("<u4")
    words = np.zeros((n, k // 32, bits), np.uint32)
    wide = codes.reshape(n, k // 32, 32)
    for i in range(32):
        j, shift = divmod(i * bits, 32)
        code = wide[:, :, i].astype(np.uint32)
        words[:, :, j] |= code << np.uint32(shift)
        if shift + bits > 32:
            words[:, :, j + 1] |= code >> np.uint32(32 - shift)
    return words.reshape(n, -1)


def unpack_codes(words: U32, bits: int) -> U8:
    """Unpack words uint32 [n, k*bits/32] into codes uint8 [n, k]."""
    n, mask = words.shape[0], 2**bits - 1
    if 8 % bits == 0:
        step, packed = 8 // bits, np.ascontiguousarray(words, "<u4").view(np.uint8)
        codes = np.empty((n, packed.shape[1] * step), np.uint8)
        for i in range(step):
            codes[:, i::step] = (packed >> np.uint8(i * bits)) & np.uint8(mask)
        return codes
    groups = words.reshape(n, -1, bits)
    wide = np.empty((n, groups.shape[1], 32), np.uint8)
    for i in range(32):
        j, shift = divmod(i * bits, 32)
        code = groups[:, :, j] >> np.uint32(shift)
        if shift + bits > 32:
            code |= groups[:, :, j + 1] << np.uint32(32 - shift)
        wide[:, :, i] = code & np.uint32(mask)
    return wide.reshape(n, -1)
