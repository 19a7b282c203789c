"""Chooses the kernel of every matmul: a matvec for few rows, a tiled matmul for many."""

from __future__ import annotations

from nearfar.kernels.contract import Products, Stage, Staged
from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.classes import SOFTWARE, Tuning
from nearfar.targets.gpu.kernels import software
from nearfar.targets.gpu.kernels.linear import cooperative
from nearfar.targets.gpu.kernels.linear.layout import params
from nearfar.targets.gpu.kernels.linear.matmul import matmul
from nearfar.targets.gpu.kernels.linear.matmul_int8 import int8_products, matmul_int8
from nearfar.targets.gpu.kernels.linear.matvec import VECTOR_ROWS, matvec, takes
from nearfar.targets.gpu.kernels.script.vectors import fits

MATVEC_ROWS = 7  # a tile of the matmul has 16 rows; up to half of it, the matvec does less work


def linear(job: Linear, tuning: Tuning) -> Staged:
    """The launches of a job: one, or two if its rows are rounded (rows for logits never are).

    Rows or columns that are not whole vectors take the software kernels.
    """
    made_of = products(job, tuning)
    if _plain(job, tuning):
        func = (software.matvec if job.m <= MATVEC_ROWS else software.matmul)(job, tuning.vectors)
    elif made_of == "int8":
        return matmul_int8(job, tuning.device)
    elif made_of == "cooperative":
        func = cooperative.matmul(job)
    else:
        func = (matvec if takes(job, tuning.device) else matmul)(job, tuning)
    return Staged((Stage(func, tuple(params(job))),))


def products(job: Linear, tuning: Tuning) -> Products:
    """The program's kind of products if the job allows it, else "float"."""
    if _plain(job, tuning):
        return "float"
    able = {
        "float": True,
        "int8": job.m > VECTOR_ROWS and int8_products(job.matrix) and not job.rows,
        "cooperative": cooperative.cooperates(job),
    }
    return tuning.products if able[tuning.products] else "float"


def _plain(job: Linear, tuning: Tuning) -> bool:
    """Whether the software kernels take the job."""
    return tuning.device is SOFTWARE or not fits(job)
