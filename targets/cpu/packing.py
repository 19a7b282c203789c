"""How matrices lie in memory for the CPU kernels: blocks of 16 output rows, interleaved.

A block's inner axis is the 16 rows, so one vector load gives 8 rows' weights for the same inputs, the inputs are broadcast,
and every lane sums its own row: no horizontal additions. Rows are padded to whole blocks with zeros.
"""

from __future__ import annotations

import numpy as np

from nearfar.targets.quantized import Array, Matrix, Part, QuantTensor

ROWS = 16


def blocks(n: int) -> int:
    """Blocks of ROWS rows that hold n rows."""
    return -(-n // ROWS)


def per_word(bits: int) -> int:
    """Codes in one 32-bit word."""
    return 32 // bits


def parts(matrix: Matrix) -> tuple[Part, ...]:
    """Quantized: `codes` (words of 8 or 4 inputs of one row) and `affine` (scale, then bias, of each group); dense: `dense`."""
    nb, k = blocks(matrix.n), matrix.k
    if not matrix.quantized:
        return (Part("dense", (nb, k, ROWS), "float16" if matrix.bits == 16 else "float32"),)
    return (
        Part("codes", (nb, k // per_word(matrix.bits), ROWS), "uint32"),
        Part("affine", (nb, k // matrix.group, 2, ROWS), "float16"),
    )


def _by_block(array: Array, n: int) -> Array:
    """[n, c] to [blocks, c, ROWS], rows padded with zeros."""
    padded = np.zeros((blocks(n) * ROWS, array.shape[1]), array.dtype)
    padded[:n] = array
    return np.ascontiguousarray(padded.reshape(-1, ROWS, array.shape[1]).transpose(0, 2, 1))


def pack(matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
    """Pack a matrix into its parts (see `parts`)."""
    if not isinstance(tensor, QuantTensor):
        dtype = np.float16 if matrix.bits == 16 else np.float32
        return (_by_block(np.asarray(tensor, dtype), matrix.n),)
    # Input 2j of a word sits in its low half, input 2j+1 in its high half, both at bit j·bits: a shift and a mask
    # give a pair of int16 for the multiply-add of 16-bit pairs.
    step = per_word(matrix.bits)
    words, codes = np.zeros((matrix.n, matrix.k // step), np.uint32), tensor.codes
    for i in range(step):
        words |= codes[:, i::step].astype(np.uint32) << np.uint32((i // 2) * matrix.bits + (i % 2) * 16)
    affine = np.stack([_by_block(tensor.scales, matrix.n), _by_block(tensor.biases, matrix.n)], axis=2)
    return _by_block(words, matrix.n), np.ascontiguousarray(affine.astype(np.float16))
