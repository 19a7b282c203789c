"""Every matmul of the model: a matvec for few rows, a tiled matmul for many."""

from __future__ import annotations

from nearfar.targets.gpu.classes import SOFTWARE, Tuning
from nearfar.targets.jobs import Linear
from nearfar.targets.kernels import Stage, Staged

from . import cooperative, software
from .layout import params
from .matmul import matmul
from .matmul_int8 import matmul_int8, rounds
from .matvec import VECTOR_ROWS, matvec
from .vectors import fits

MATVEC_ROWS = 7  # a tile of the matmul has 16 rows; up to half of it, the matvec does less work


def linear(job: Linear, tuning: Tuning) -> Staged:
    """The launch of a job, two where its rows are rounded (those that logits are made of never are). Rows or
    columns that are no whole vectors take the software kernels.
    """
    if tuning.device is SOFTWARE or not fits(job):
        func = (software.matvec if job.m <= MATVEC_ROWS else software.matmul)(job, tuning.vectors)
    elif tuning.products == "int8" and job.m > VECTOR_ROWS and rounds(job.matrix) and not job.rows:
        return matmul_int8(job, tuning.device)
    elif tuning.products == "cooperative" and cooperative.cooperates(job):
        func = cooperative.matmul(job)
    else:
        func = (matvec if job.m <= VECTOR_ROWS else matmul)(job, tuning)
    return Staged((Stage(func, tuple(params(job))),))
