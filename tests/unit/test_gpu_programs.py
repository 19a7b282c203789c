"""Programs of the GPU targets share a kernel if they agree in everything that it depends on."""

from __future__ import annotations

import pytest

from nearfar.kernels.contract import Precision, Products
from nearfar.kernels.jobs import Attend, Job, Linear, Norm
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES
from tests.support import gpu_jobs, project_jobs

MATRIX = Matrix(128, 256, 4, 32)
FEW = Linear(1, MATRIX, "float32", "float32")
MANY = Linear(64, MATRIX, "float32", "float32", norm=1e-5)
LOGITS = Linear(16, MATRIX, "float32", "float32", rows=True, x_rows=64)
JOBS: dict[str, Job] = {
    "few rows": FEW,
    "logits": LOGITS,
    "no codes": Linear(64, Matrix(128, 176, 32), "float16", "float16"),
    "attention": gpu_jobs.paged(Attend, (1, 8, 2, 64), "float16"),
    "prefill": gpu_jobs.paged(Attend, (64, 8, 2, 64), "float16"),
    "projection": project_jobs.job((1, 4, 2, 64)),
    "norm": Norm(1, 256, 1e-5),
}


@pytest.mark.parametrize("name", JOBS)
def test_programs_of_other_products_share_what_has_none(name: str) -> None:
    made = [
        variant(CLASSES["discrete"], "f16", False, products).kernels.stages(JOBS[name])
        for products in ("float", "int8")
    ]
    assert made[0] is made[1]


@pytest.mark.parametrize("name", ["attention", "prefill", "norm"])
def test_both_precisions_share_what_looks_at_its_job_only(name: str) -> None:
    precisions: tuple[Precision, ...] = ("f16", "f32")
    made = [variant(CLASSES["mobile"], each, False).kernels.stages(JOBS[name]) for each in precisions]
    assert made[0] is made[1]


def test_products_classes_and_precisions_that_a_kernel_depends_on_tell_kernels_apart() -> None:
    every: tuple[tuple[str, Precision, Products], ...] = (
        ("discrete", "f16", "float"), ("discrete", "f16", "int8"), ("discrete", "f16", "cooperative"),
        ("discrete", "f32", "float"), ("mobile", "f16", "float"),
    )  # fmt: skip
    made = [
        variant(CLASSES[device], precision, False, products).kernels.stages(MANY)
        for device, precision, products in every
    ]
    assert len({tuple(stage.func.script() for stage in staged.stages) for staged in made}) == len(every)
