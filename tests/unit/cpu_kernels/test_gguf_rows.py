"""Rows of GGUF's types as the CPU's kernels read them equal those of the gguf package bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.build.weights.quantized.gguf_blocks import BLOCKS
from nearfar.format.scales import ALL
from nearfar.targets.cpu.target import TARGET
from tests.support.cpu_jobs import KERNELS, CpuJobs
from tests.support.gguf_rows import OWN_BYTES, block_size, embed_arrays, embed_job

PLAIN = ("Q4_1", "Q5_1", "MXFP4")
"""Types whose scales and offsets are float16 numbers."""
EXACT = sorted({*OWN_BYTES, *PLAIN})


def widths(kind: str) -> tuple[int, ...]:
    """Rows of several superblocks, and of an odd number of groups where a type has none."""
    block = block_size(kind)
    return (3 * block,) if block > 32 else (32, 160, 192)


CASES = [(kind, k) for kind in EXACT for k in widths(kind)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return CpuJobs(tmp_path_factory.mktemp("gguf"), [embed_job(kind, k, TARGET.held) for kind, k in CASES])


@pytest.mark.parametrize(("kind", "k"), CASES)
def test_rows_are_those_of_the_file(jobs, kind, k):
    job = embed_job(kind, k, TARGET.held)
    arrays, expected = embed_arrays(KERNELS, kind, job.matrix)
    np.testing.assert_array_equal(jobs.compute(job, arrays)["out"], expected)


def test_every_way_of_storing_scales_is_some_types():
    assert {BLOCKS[kind].scales for kind in BLOCKS} == set(ALL)
