"""Embeddings and norms of the CPU target against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.format.scales import CODE_BITS
from nearfar.kernels.jobs import Embed, Norm
from nearfar.kernels.quantized import Matrix
from tests.support.cpu_jobs import CpuJobs, inputs_of
from tests.support.turns import share

EMBED = share([
    *(Embed(4, Matrix(70, 256, bits, group), scale)
      for bits in CODE_BITS for group in (16, 32, 64, 128) for scale in (1.0, 22.625)),
    *(Embed(m, Matrix(515, 172, bits), scale) for bits in (16, 32) for m in (1, 64) for scale in (1.0, 0.5)),
    Embed(64, Matrix(35, 96, 5, 16)), Embed(1, Matrix(35, 96, 3, 16)),
], 3)  # fmt: skip
NORM = [
    *(Norm(m, k, 1e-5, residual=residual)
      for m in (1, 4, 64) for k in (64, 172, 13) for residual in (False, True)),
    Norm(4, 96, 1e-6, weight=False), Norm(4, 60, 1e-6, weight=False, residual=True),
    Norm(1, 96, 1e-6, groups=4), Norm(4, 60, 1e-6, groups=3, each=True), Norm(4, 64, 0.5),
    Norm(16, 60, 1e-6, groups=5, residual=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return CpuJobs(tmp_path_factory.mktemp("rows"), [*EMBED, *NORM])


@pytest.mark.parametrize("job", EMBED, ids=lambda job: job.label)
def test_embed(jobs, job):
    """Results are exact within the rounding of float32: the packed integers come back."""
    inputs = inputs_of(job, np.random.default_rng(0))
    inputs["tokens"][: min(job.m, 4)] = [0, job.matrix.n - 1, 17, 16][: job.m]
    jobs.check(job, inputs, 3e-7)


def test_padding_rows_of_an_embedding_are_finite(jobs):
    """This holds for any token id in a row of padding."""
    job = EMBED[0]
    inputs = inputs_of(job, np.random.default_rng(0))
    inputs["tokens"][:4] = [5, -1, 2**31 - 1, job.matrix.n]
    assert np.isfinite(jobs.compute(job, inputs)["out"]).all()


@pytest.mark.parametrize("job", NORM, ids=lambda job: job.label)
def test_norm(jobs, job):
    jobs.check(job, inputs_of(job, np.random.default_rng(1)), 1e-6)
