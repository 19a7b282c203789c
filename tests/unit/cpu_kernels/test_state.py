"""Convolutions, the delta rule and state spaces of the CPU target against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.kernels.jobs import Conv, Delta, Ssm
from tests.support.cpu_jobs import CpuJobs
from tests.support.job_reference import reference, state_inputs

CONVS = [
    Conv(m, width, taps, 16, 4, 4, activation, bias)
    for m, width, taps, activation, bias in (
        (1, 48, 3, None, False), (4, 40, 4, "silu", True), (64, 100, 20, None, True),
        (16, 5, 1, "sigmoid", False),
    )
]  # fmt: skip
DELTAS = [
    Delta(m, heads, key_heads, key_dim, value_dim, 32, 4, 4, 1e-6, *tiled)
    for m, heads, key_heads, key_dim, value_dim, *tiled in (
        (1, 4, 2, 16, 32), (4, 3, 3, 12, 20), (16, 2, 1, 8, 160), (64, 4, 2, 16, 32), (64, 2, 2, 20, 20),
        (64, 6, 2, 12, 20, True),
    )
]  # fmt: skip
SSMS = [
    Ssm(m, heads, groups, depth, head_dim, 32, 4, 4, *limits)
    for m, heads, groups, depth, head_dim, *limits in (
        (1, 4, 1, 16, 32), (4, 6, 3, 12, 20, 0.1, 0.9), (16, 2, 2, 8, 160), (64, 4, 2, 16, 32, 0.01),
        (64, 3, 1, 20, 24),
    )
]  # fmt: skip
JOBS: list[Conv | Delta | Ssm] = [*CONVS, *DELTAS, *SSMS]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> CpuJobs:
    return CpuJobs(tmp_path_factory.mktemp("state"), JOBS)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_rows_of_three_sequences_and_padding(jobs: CpuJobs, job: Conv | Delta | Ssm) -> None:
    """Outputs and written pages equal those of the reference; all other pages stay unchanged."""
    inputs = state_inputs(job, np.random.default_rng(job.m))
    want = reference(job, inputs)
    got = jobs.run(job, inputs | {"out": np.full(job.out[0], 7, np.float32)})
    for name, expected in want.items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=2e-5, err_msg=name)
