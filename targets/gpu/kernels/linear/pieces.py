"""Jobs over a matrix in pieces: the launches of each piece write columns, or rows, of one output.

A launch binds one piece, so of the others its kernel knows only where the piece's columns begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nearfar.kernels.contract import SCRATCH, Stage, Staged
from nearfar.kernels.jobs import Embed, Linear
from nearfar.targets.gpu.kernels.linear.glu import glu
from nearfar.targets.gpu.packing import parts
from nearfar.targets.gpu.pieces import MatrixPiece


def of_pieces(
    job: Linear | Embed, pieces: Sequence[MatrixPiece], stages: Callable[[Linear | Embed], Staged]
) -> Staged:
    """The launches of all pieces; `stages` gives the launches of a job over one piece.

    Gate and up rows of a column are in different pieces: they are computed as columns of a scratch buffer,
    and one more launch joins them.
    """
    if not isinstance(job, Linear) or job.gate is None:
        return _joined(job, pieces, stages)
    plain = replace(job, gate=None, softcap=None, residual=False, out_dtype="float32")
    made = _joined(plain, pieces, stages)
    between = f"{SCRATCH}{len(made.scratch)}"
    renamed = [
        replace(stage, args=tuple(between if arg == "out" else arg for arg in stage.args))
        for stage in made.stages
    ]
    return Staged((*renamed, Stage(glu(job), glu_args(job, between))), (*made.scratch, plain.out))


def glu_args(job: Linear, between: str) -> tuple[str, ...]:
    """The inputs of the launch that joins gate and up."""
    return (between, *["residual"] * job.residual, "out")


def _joined(
    job: Linear | Embed, pieces: Sequence[MatrixPiece], stages: Callable[[Linear | Embed], Staged]
) -> Staged:
    launches: list[Stage] = []
    scratch: list[tuple[tuple[int, ...], str]] = []
    each = len(parts(job.matrix))
    for index, piece in enumerate(pieces):
        made = stages(replace(job, matrix=piece.matrix, first=piece.first, of=job.matrix.n))
        names = {f"w{i}": f"w{index * each + i}" for i in range(each)}
        names |= {f"{SCRATCH}{i}": f"{SCRATCH}{len(scratch) + i}" for i in range(len(made.scratch))}
        launches += [replace(s, args=tuple(names.get(arg, arg) for arg in s.args)) for s in made.stages]
        scratch += made.scratch
    return Staged(tuple(launches), tuple(scratch))
