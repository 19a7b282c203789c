"""Rows of GGUF's types as the CPU's kernels read them: bit for bit what the gguf package says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.build.weights.quantized.gguf_blocks import BLOCKS, read_rows
from nearfar.format.scales import ALL, PAIRS
from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.jobs import Embed
from nearfar.kernels.quantized import Matrix
from tests.support.cpu_jobs import KERNELS, CpuJobs
from tests.support.gguf_files import KINDS, floats, random_rows

ROWS = 37
PLAIN = ("Q4_1", "Q5_1", "IQ4_NL", "MXFP4")
"""Types whose scales and offsets are float16 numbers."""
EXACT = sorted({kind for kind, block in BLOCKS.items() if block.scales != PAIRS}.union(PLAIN))


def job(kind: str, k: int) -> Embed:
    scheme = BLOCKS[kind].scheme(k)
    assert scheme is not None
    return Embed(ROWS, Matrix(ROWS, k, scheme.bits, scheme.group_size, scales=scheme.scales))


def widths(kind: str) -> tuple[int, ...]:
    """Rows of several superblocks, and of an odd number of groups where a type has none."""
    block, _ = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    return (3 * block,) if block > 32 else (32, 160, 192)


CASES = [(kind, k) for kind in EXACT for k in widths(kind)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return CpuJobs(tmp_path_factory.mktemp("gguf"), [job(kind, k) for kind, k in CASES])


@pytest.mark.parametrize(("kind", "k"), CASES)
def test_rows_are_those_of_the_file(jobs, kind, k):
    rows = random_rows(kind, ROWS, k, seed=k)
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    asked = job(kind, k)
    scheme = BLOCKS[kind].scheme(k)
    carried = read_rows(kind, rows, size).carried(scheme.bits, kind, scheme.scales)
    assert (carried.step, carried.rounded) == (0, 0)
    (packed,) = KERNELS.pack(asked.matrix, carried.rows)
    tokens = np.zeros(MAX_STEP, np.int32)
    tokens[:ROWS] = np.arange(ROWS)
    got = jobs.compute(asked, {"tokens": tokens, "w0": packed})["out"]
    np.testing.assert_array_equal(got, floats(rows, kind))


def test_every_way_of_storing_scales_is_some_types():
    assert {BLOCKS[kind].scales for kind in BLOCKS} == set(ALL)
