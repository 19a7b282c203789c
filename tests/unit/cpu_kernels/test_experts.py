"""The CPU target's routing to experts, and their gated MLPs, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.kernels.jobs import Experts, Route
from tests.support.cpu_jobs import CpuJobs, inputs_of
from tests.support.gpu_jobs import experts
from tests.support.turns import share

ROUTES = [
    Route(1, 4, 2), Route(4, 64, 8, normalize=0.0), Route(16, 37, 5, "sigmoid", 1e-6, bias=True, scale=2.5),
    Route(64, 128, 1, factors=True), Route(4, 6, 6, bias=True),
    Route(1, 16, 4, normalize=0.0, scale=0.5), Route(4, 19, 3, normalize=0.0, scale=0.5, factors=True),
]  # fmt: skip


ALIKE = [experts(m, 8, 2, (128, 64, 128), 4, 64, activation="gelu_tanh") for m in (1, 4, 64)]
EXPERTS = [*ALIKE, *share([
    *(experts(m, 6, 2, (48, 20, 44), bits) for bits in (16, 32) for m in (1, 4, 64)),
    *(experts(m, 5, 3, (64, 96, 40), 4, 32, gate_up_bias=True, down_bias=True, clamp=(1.702, 1.0))
      for m in (1, 16)),
    experts(4, 3, 3, (32, 32, 19), 5, 32, down_bias=True), experts(16, 2, 1, (64, 64, 32), 8, 32),
    experts(1, 40, 8, (32, 33, 16), 32, gate_up_bias=True, activation="relu2"),
    experts(4, 5, 2, (64, 96, 40), 4, 32, gate_up_bias=True, activation="relu2", gated=False),
], 2)]  # fmt: skip


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> CpuJobs:
    return CpuJobs(tmp_path_factory.mktemp("experts"), [*ROUTES, *EXPERTS])


@pytest.mark.parametrize("job", ROUTES, ids=lambda job: job.label)
def test_route(jobs: CpuJobs, job: Route) -> None:
    inputs = inputs_of(job, np.random.default_rng(job.experts))
    inputs["positions"][: job.m] = 5
    if job.m > 1:
        inputs["positions"][1] = -1
    jobs.check(job, inputs, 1e-6)


def test_of_equal_experts_the_first_are_chosen(jobs: CpuJobs) -> None:
    job = ROUTES[1]
    inputs = inputs_of(job, np.random.default_rng(0)) | {"positions": np.zeros(256, np.int32)}
    inputs["x"][...] = 1.5
    inputs["x"][:, 40] = 2
    assert jobs.compute(job, inputs)["out"][:, :8].tolist() == [[40, 0, 1, 2, 3, 4, 5, 6]] * job.m


@pytest.mark.parametrize("job", EXPERTS, ids=lambda job: job.label)
def test_experts(jobs: CpuJobs, job: Experts) -> None:
    """The rows have random experts, then all the same experts, then no experts."""
    inputs = inputs_of(job, np.random.default_rng(job.m))
    tolerance = 6e-4 if job.down.quantized or job.gate_up.quantized else 5e-6  # two products, see test_linear
    jobs.check(job, inputs, tolerance)
    inputs["route"] = np.tile(inputs["route"][:1], (job.m, 1))
    jobs.check(job, inputs, tolerance)
    inputs["route"][:, : job.top] = -1
    jobs.check(job, inputs, tolerance)


def test_a_row_is_the_same_alone_and_among_others(jobs: CpuJobs) -> None:
    """Results are equal to the last bit: a text does not depend on rows of other sequences."""
    one, _, many = ALIKE
    inputs = inputs_of(many, np.random.default_rng(3))
    whole = jobs.compute(many, inputs)["out"]
    for row in (0, 17, 63):
        alone = inputs | {name: inputs[name][row : row + 1] for name in ("x", "route")}
        assert (jobs.compute(one, alone)["out"][0] == whole[row]).all()
