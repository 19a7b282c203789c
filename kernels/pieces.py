"""Jobs over a matrix in pieces: the launches of each piece write columns, or rows, of one output.

A piece is a matrix with some of the rows, which are columns of a kernel's output: it is packed and read like
any other. A launch reads one piece, so of the others its kernel knows only where the piece's columns begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nearfar.kernels.contract import SCRATCH, Stage, Staged
from nearfar.kernels.jobs import Embed, Linear
from nearfar.kernels.quantized import Matrix, PackedArray


@dataclass(frozen=True)
class MatrixPiece:
    """The rows of a matrix from `first` on, as a matrix."""

    first: int
    matrix: Matrix


def placed(matrix: Matrix) -> tuple[MatrixPiece, ...]:
    """The pieces of a matrix whose rows are not stored alike, or the whole matrix."""
    found, first = [], 0
    for piece in matrix.pieces or (matrix,):
        found.append(MatrixPiece(first, piece))
        first += piece.n
    return tuple(found)


def joined(
    job: Linear | Embed,
    pieces: Sequence[MatrixPiece],
    parts: Callable[[Matrix], Sequence[PackedArray]],
    stages: Callable[[Linear | Embed], Staged],
) -> Staged:
    """The launches of all pieces; `stages` gives those of a job over one piece. The job has no gate."""
    launches: list[Stage] = []
    scratch: list[tuple[tuple[int, ...], str]] = []
    before = 0
    for piece in pieces:
        made = stages(replace(job, matrix=piece.matrix, first=piece.first, of=job.matrix.n))
        count = len(parts(piece.matrix))
        names = {f"w{i}": f"w{before + i}" for i in range(count)}
        names |= {f"{SCRATCH}{i}": f"{SCRATCH}{len(scratch) + i}" for i in range(len(made.scratch))}
        launches += [replace(s, args=tuple(names.get(arg, arg) for arg in s.args)) for s in made.stages]
        scratch += made.scratch
        before += count
    return Staged(tuple(launches), tuple(scratch))
