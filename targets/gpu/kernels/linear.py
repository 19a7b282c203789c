"""Every matmul of the model: a matvec for few rows, a tiled matmul for many."""

from __future__ import annotations

from nearfar.targets.gpu.classes import Tuning
from nearfar.targets.jobs import Linear
from nearfar.targets.kernels import Stage, Staged

from .layout import params
from .matmul import matmul
from .matvec import matvec

MATVEC_ROWS = 7  # a tile of the matmul has 16 rows; up to half of it, the matvec does less work


def linear(job: Linear, tuning: Tuning) -> Staged:
    """The one launch of a job."""
    kernel = matvec if job.m <= MATVEC_ROWS else matmul
    func = kernel(job, tuning.vectors)
    return Staged((Stage(func, tuple(params(job))),))
