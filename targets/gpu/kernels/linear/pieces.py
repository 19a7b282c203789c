"""Jobs of a GPU over a matrix in pieces (kernels/pieces.py): gates are joined in a launch of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nearfar.kernels.contract import SCRATCH, Stage, Staged
from nearfar.kernels.jobs import Embed, Linear
from nearfar.kernels.pieces import MatrixPiece, joined
from nearfar.targets.gpu.kernels.linear.glu import glu
from nearfar.targets.gpu.packing import parts


def of_pieces(
    job: Linear | Embed, pieces: Sequence[MatrixPiece], stages: Callable[[Linear | Embed], Staged]
) -> Staged:
    """The launches of all pieces; `stages` gives the launches of a job over one piece.

    Gate and up rows of a column are in different pieces: they are computed as columns of a scratch buffer,
    and one more launch joins them.
    """
    if not isinstance(job, Linear) or job.gate is None:
        return joined(job, pieces, parts, stages)
    plain = replace(job, gate=None, softcap=None, residual=False, out_dtype="float32")
    made = joined(plain, pieces, parts, stages)
    between = f"{SCRATCH}{len(made.scratch)}"
    renamed = [
        replace(stage, args=tuple(between if arg == "out" else arg for arg in stage.args))
        for stage in made.stages
    ]
    return Staged((*renamed, Stage(glu(job), glu_args(job, between))), (*made.scratch, plain.out))


def glu_args(job: Linear, between: str) -> tuple[str, ...]:
    """The inputs of the launch that joins gate and up."""
    return (between, *["residual"] * job.residual, "out")
