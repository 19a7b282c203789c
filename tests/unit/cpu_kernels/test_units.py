"""The vector units of the CPU target that this machine has compute the same bits."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.errors import BuildError
from nearfar.format.machines import architecture
from nearfar.format.processor import cpu_flags
from nearfar.format.scales import CODE_BITS
from nearfar.kernels.jobs import Embed, Linear, Norm
from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu.units import BASELINE, UNITS, unit_named
from tests.support.cpu_jobs import CpuJobs, inputs_of
from tests.support.scales import ODD, STORED_AS
from tests.support.turns import paired, share

HERE = architecture()
FIRST = BASELINE[HERE]
OTHERS = [unit for unit in UNITS.values() if unit.architecture == HERE and unit != FIRST]
JOBS = share([
    *(Linear(m, Matrix(48, 256, bits, group), "float32", "float32", norm=1e-5, residual=True)
      for bits, (m, group) in paired(CODE_BITS, ((1, 16), (1, 64), (2, 32), (4, 64), (16, 128)))),
    *(Linear(m, Matrix(40, 256, bits, group, scales=how), "float32", "float32", norm=1e-5)
      for (bits, group, how), m in paired(STORED_AS, (1, 4, 16))),
    *(Embed(4, Matrix(40, 512, bits, group, scales=how)) for bits, group, how in STORED_AS[::2]),
    *(Linear(1, Matrix(40, k, bits, group, scales=how), "float32", "float32")
      for bits, group, k, how in ODD[:2]),
    Embed(4, Matrix(40, 576, 4, 32, scales=ODD[0][3])),
    Linear(8, Matrix(70, 128, 8, 32), "float32", "float32", bias=True),
    *(Linear(m, Matrix(72, 256, bits, group, scales=how), "float32", "float32", norm=1e-5, residual=True)
      for (bits, group, how), m in paired(STORED_AS, (32, 64))),
    Linear(36, Matrix(96, 192, 5, 64), "float32", "float32", gate="silu"),
    Linear(34, Matrix(40, 256, 6, 32), "float32", "float32"),
    Linear(16, Matrix(96, 128, 4, 64), "float32", "float32", norm=1e-6, gate="silu"),
    Linear(16, Matrix(64, 172, 16), "float32", "float32"),
    Linear(1, Matrix(64, 172, 32), "float32", "float32"),
    Embed(4, Matrix(70, 256, 5, 32), 22.625), Norm(4, 172, 1e-5),
], 2)  # fmt: skip


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return CpuJobs(tmp_path_factory.mktemp(FIRST.name), JOBS, unit=FIRST)


@pytest.fixture(scope="module", params=OTHERS, ids=lambda unit: unit.name)
def other(request, tmp_path_factory):
    if lacking := set(request.param.features) - cpu_flags():
        pytest.skip(f"this CPU lacks {', '.join(sorted(lacking))}")
    return CpuJobs(tmp_path_factory.mktemp(request.param.name), JOBS, unit=request.param)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_units_compute_the_same_bits(first, other, job):
    """All units use one packing, and add the same partial sums."""
    inputs = inputs_of(job, np.random.default_rng(7))
    np.testing.assert_array_equal(other.compute(job, inputs)["out"], first.compute(job, inputs)["out"])


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_the_baseline_is_right(first, job):
    first.check(job, inputs_of(job, np.random.default_rng(7)), 2e-4)


def test_a_unit_that_there_is_not_is_refused():
    with pytest.raises(
        BuildError, match="no unit of x86_64 is called 'neon': use native, baseline or of avx2"
    ):
        unit_named("neon", "x86_64")
