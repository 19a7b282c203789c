"""The layout of weight matrices on GPU targets (webgpu, vulkan): the same arrays for f16 and f32 kernels.

All are k-major: [k/…, n], so that neighbouring threads, which own neighbouring output rows, read neighbouring
words. A thread then needs no other thread's sums: no workgroup memory and no barrier in the decode kernels.
Loads are coalesced on a GPU; in SwiftShader, where a kernel with a barrier runs every four threads as a fiber
(5 microseconds each), the layout made the matvec four times faster.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nearfar.kernels.codes import pack_codes
from nearfar.kernels.quantized import Array, Matrix, PackedArray, QuantTensor, StorableMatrices
from nearfar.targets.gpu.levels import LevelRows, pack_levels

HELD = StorableMatrices(widens=True)
"""What artifacts store. Rows with scales of one level are stored alike: few bytes buy fewer kernels."""
SIGN_BIT = np.uint32(1 << 31)
PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Bits of the planes into which codes are split, the low ones first; a word has whole codes."""


def parts(matrix: Matrix) -> tuple[PackedArray, ...]:
    """The packed arrays of a matrix.

    Quantized: `codes`, low bits first along k, and `scale_bias`, the float16 bits of a group's scale in the
    low half and of its bias in the high half. Without biases, `scales` instead: a word has the float16 bits
    of the scales of two neighbouring columns, so that the word of a vector of columns is half as long. With
    integer scales, `levels` instead (levels.py). Codes of one plane have the sign bit of each word inverted
    (so that the top code, masked in place, reads as the int32 (code - 2^(bits-1)) * 2^(32-bits)); of two
    planes, all rows of the low bits come before those of the high ones. float16 is packed in pairs along k
    too, since a device without the feature `shader-f16` cannot declare it, and both precisions share one set
    of weights.
    """
    n, k = matrix.n, matrix.k
    if matrix.quantized:
        codes = PackedArray("codes", (k * matrix.bits // 32, n), "uint32")
        if (levels := LevelRows.of(matrix)) is not None:
            return codes, PackedArray("levels", (levels.rows, n), "uint32")
        if not matrix.scales.offsets:
            return codes, PackedArray("scales", (k // matrix.group, (n + 1) // 2), "uint32")
        return codes, PackedArray("scale_bias", (k // matrix.group, n), "uint32")
    if matrix.bits == 16:
        return (PackedArray("pairs", ((k + 1) // 2, n), "uint32"),)
    return (PackedArray("values", (k, n), "float32"),)


def pack(matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
    """Pack a matrix into its parts."""
    if isinstance(tensor, QuantTensor):
        codes = np.ascontiguousarray(_planes(tensor).T)
        if tensor.units is not None:
            return codes, pack_levels(matrix, tensor)
        if not matrix.scales.offsets:
            return codes, _neighbours(tensor.scales)
        return codes, np.ascontiguousarray(_pack_pairs(tensor.scales, tensor.biases).T)
    if matrix.bits == 16:
        halves = tensor.astype(np.float16)
        padded = np.pad(halves, ((0, 0), (0, matrix.k % 2)))
        return (np.ascontiguousarray(_pack_pairs(padded[:, 0::2], padded[:, 1::2]).T),)
    return (np.ascontiguousarray(tensor.T, dtype=np.float32),)


def _planes(tensor: QuantTensor) -> npt.NDArray[np.uint32]:
    """The words uint32 [n, k*bits/32], plane after plane."""
    bits = PLANES[tensor.bits]
    if len(bits) == 1:
        return tensor.words ^ SIGN_BIT
    low, high = bits
    codes = tensor.codes
    planes = (codes & np.uint8((1 << low) - 1), low), (codes >> np.uint8(low), high)
    return np.concatenate([pack_codes(plane, width) for plane, width in planes], axis=1)


def _neighbours(scales: npt.NDArray[np.float16]) -> npt.NDArray[np.uint32]:
    """The scales [n, groups] as words [groups, n/2]: of two neighbouring columns each, the last with 0."""
    columns = np.pad(scales, ((0, len(scales) % 2), (0, 0)))
    return np.ascontiguousarray(_pack_pairs(columns[0::2], columns[1::2]).T)


def _pack_pairs(low: npt.NDArray[np.float16], high: npt.NDArray[np.float16]) -> npt.NDArray[np.uint32]:
    """Two float16 arrays as the low and high halves of words."""
    return np.ascontiguousarray(np.stack([low, high], axis=-1)).view("<u4")[..., 0]
