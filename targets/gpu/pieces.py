"""Matrices with arrays larger than a device can bind: they are stored in several pieces, each with some of
the rows.

Rows of the matrix are columns of a kernel's output, so a piece is a matrix of its own: it is packed and read
like any other. A piece of a stack of experts' matrices has whole experts. A matrix that fits is one piece,
and its arrays have the names that `packing` gives them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from nearfar.errors import BuildError
from nearfar.format.consistency import DTYPE_BYTES
from nearfar.kernels.pieces import MatrixPiece, placed
from nearfar.kernels.quantized import Array, Matrix, PackedArray, QuantPieces, QuantTensor
from nearfar.targets.gpu import packing

BINDING = 128 << 20
"""Bytes of the largest storage buffer that every WebGPU device can bind (maxStorageBufferBindingSize)."""
COLUMNS = 64
"""Pieces have a multiple of this number of columns: whole workgroups, whole vectors."""


def pieces(matrix: Matrix, binding: int = BINDING) -> tuple[MatrixPiece, ...]:
    """The fewest pieces without an array of more than `binding` bytes, as equal as `_step` allows, of each
    piece that is stored in its own way; BuildError if none are small enough.
    """
    return tuple(
        replace(found, first=piece.first + found.first)
        for piece in placed(matrix)
        for found in _cut(piece.matrix, binding)
    )


def _cut(matrix: Matrix, binding: int) -> tuple[MatrixPiece, ...]:
    """The pieces of a matrix that is stored in one way."""
    step = _step(matrix)
    count = 1
    while count * step < matrix.n and _bytes(_rows(matrix, count)) > binding:
        count += 1
    each = _rows(matrix, count)
    if _bytes(each) > binding:
        what = "rows of a matrix" if matrix.stack == 1 else "rows of one expert in a matrix"
        raise BuildError(
            f"{each.n} {what} [{matrix.n}, {matrix.k}] take {_bytes(each):,} bytes, and a device "
            f"may bind no more than {binding:,}: quantize it (--quant q4)"
        )
    firsts = range(0, matrix.n, each.n)
    return tuple(MatrixPiece(first, _part(matrix, min(each.n, matrix.n - first))) for first in firsts)


def parts(matrix: Matrix, binding: int = BINDING) -> tuple[PackedArray, ...]:
    """The packed arrays of a matrix: those of its pieces, piece after piece, `<part>.<piece>` where it has
    several.
    """
    found = pieces(matrix, binding)
    if len(found) == 1:
        return packing.parts(matrix)
    return tuple(
        replace(part, name=f"{part.name}.{index}")
        for index, piece in enumerate(found)
        for part in packing.parts(piece.matrix)
    )


def pack(
    matrix: Matrix, tensor: QuantTensor | QuantPieces | Array, binding: int = BINDING
) -> tuple[Array, ...]:
    """Pack a matrix into its parts."""
    if isinstance(tensor, QuantPieces):
        pairs = zip(matrix.pieces, tensor.pieces, strict=True)
        return tuple(array for piece, rows in pairs for array in pack(piece, rows, binding))
    packed: list[Array] = []
    for piece in pieces(matrix, binding):
        rows = slice(piece.first, piece.first + piece.matrix.n)
        packed += packing.pack(piece.matrix, tensor[rows])
    return tuple(packed)


def _rows(matrix: Matrix, count: int) -> Matrix:
    """The largest of `count` pieces."""
    if count == 1:
        return matrix
    step = _step(matrix)
    return _part(matrix, math.ceil(math.ceil(matrix.n / count) / step) * step)


def _step(matrix: Matrix) -> int:
    """The number of rows of a piece is a multiple of COLUMNS, or of the rows of one stacked matrix."""
    return COLUMNS if matrix.stack == 1 else matrix.each.n


def _part(matrix: Matrix, rows: int) -> Matrix:
    """A piece of the matrix with this number of rows."""
    stack = 1 if matrix.stack == 1 else rows // matrix.each.n
    return replace(matrix, n=rows, stack=stack)


def _bytes(matrix: Matrix) -> int:
    """Bytes of a matrix's largest array."""
    return max(math.prod(part.shape) * DTYPE_BYTES[part.dtype] for part in packing.parts(matrix))
