"""Matmuls with cooperative matrices against NumPy, on a Vulkan device that supports them.

Mesa's lavapipe has had them since 26.2, of 8 by 8; the device reports the sizes.
"""

from __future__ import annotations

import pytest

from nearfar.edge_runtime.executors.vulkan import device, features
from nearfar.format.scales import IQ4, OF_GGUF, SYMMETRIC
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Job, Linear
from nearfar.kernels.quantized import Array, Matrix, PackedArray, QuantTensor
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import DISCRETE
from nearfar.targets.gpu.kernels.linear.choice import cooperative
from nearfar.targets.gpu.kernels.linear.layout import params
from tests.support import gpu_checks, vulkan_run

Q4 = Matrix(200, 576, 4, 64)
JOBS = {
    "plain": Linear(64, Matrix(128, 192, 4, 64), "float16", "float32"),
    "norm": Linear(64, Q4, "float32", "float16", norm=1e-5),
    "gate": Linear(100, Q4, "float32", "float16", norm=1e-5, gate="silu"),
    "ragged": Linear(33, Matrix(88, 172, 32), "float16", "float32", bias=True, residual=True),
    "planes": Linear(64, Matrix(96, 96, 6, 16), "float16", "float16", gate="gelu_erf", bias=True),
    "scales_alone": Linear(64, Matrix(96, 256, 5, 32, scales=SYMMETRIC), "float16", "float32"),
    "levels": Linear(64, Matrix(96, 512, 4, 32, scales=OF_GGUF["Q4_K"]), "float16", "float32"),
    "table": Linear(64, Matrix(96, 512, 4, 32, scales=IQ4["IQ4_XS"]), "float16", "float32"),
    "f16": Linear(256, Matrix(512, 64, 16), "float16", "float16"),
}


class Cooperating:
    """The kernels of class discrete, with another size of tiles."""

    def __init__(self, size: int, widest: int) -> None:
        self._plain, self._sizes = variant(DISCRETE, "f16", vectors=True).kernels, (size, widest)
        self.activations = self._plain.activations

    def parts(self, matrix: Matrix) -> tuple[PackedArray, ...]:
        return self._plain.parts(matrix)

    def pack(self, matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
        return self._plain.pack(matrix, tensor)

    def stages(self, job: Job) -> Staged:
        assert isinstance(job, Linear)
        assert cooperative.cooperates(job)
        return Staged((Stage(cooperative.matmul(job, *self._sizes), tuple(params(job))),))


@pytest.fixture(scope="module")
def kernels() -> Cooperating:
    """Kernels for the first size of cooperative matrices that fits and that the device has."""
    if "cooperativeMatrix" not in vulkan_run.device().features:
        pytest.skip("the Vulkan device has no cooperative matrices")
    for size in (16, 8):
        if (size, size, size, *features.COOPERATIVE[3:]) in features.matrices(device.gpus()[0].handle):
            return Cooperating(size, vulkan_run.device().subgroup.subgroupSize)
    pytest.skip("the Vulkan device has no cooperative matrices of float16 of 16 or 8")


@pytest.mark.parametrize("name", JOBS)
def test_linear(kernels: Cooperating, name: str) -> None:
    gpu_checks.check(kernels, vulkan_run.run, "f16", JOBS[name])
