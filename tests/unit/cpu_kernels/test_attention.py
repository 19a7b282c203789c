"""Attention of the CPU target against NumPy: windows, caps, sinks, head sizes, long contexts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.targets.jobs import Attend
from tests.support.cpu_jobs import CpuJobs, inputs_of

SIZE = 16


def attend(
    m: int, heads: int, kv_heads: int, d: int, kv_dtype: str = "float32", context: int = 128, **options: Any
) -> Attend:
    scale = options.pop("scale", d**-0.5)
    return Attend(
        m, heads, kv_heads, d, SIZE, 2, context // SIZE, "float32", kv_dtype, scale=scale, **options
    )


FLAGS: tuple[dict[str, Any], ...] = (
    {}, {"window": 1}, {"window": 5}, {"window": 16}, {"window": 33}, {"window": 1000}, {"softcap": 0.8},
    {"sinks": True},
    {"window": 20, "softcap": 2.0, "sinks": True, "scale": 0.7},
)  # fmt: skip
SHAPES = [
    (3, 3, 2),
    (4, 2, 6),
    (4, 1, 12),
    (8, 4, 16),
    (6, 2, 20),
    (4, 2, 24),
    (9, 3, 64),
    (5, 1, 80),
    (4, 1, 256),
    (8, 2, 512),
]
SHORT = [
    *(attend(4, 4, 2, 16, **flags) for flags in FLAGS),
    *(attend(4, *shape, kv_dtype) for shape in SHAPES for kv_dtype in ("float32", "float16")),
    attend(1, 4, 2, 16, window=20), attend(16, 4, 2, 20, "float16", window=9, sinks=True),
    attend(64, 2, 1, 8, window=24),
]  # fmt: skip
FULL, LONG = attend(4, 2, 1, 16, "float16", 32768), attend(16, 2, 1, 16, "float16", 32768, window=512)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return CpuJobs(tmp_path_factory.mktemp("attention"), [*SHORT, FULL, LONG])


def tolerance(job: Attend) -> float:
    """The cache is what it is in both; sums are float32."""
    return 1e-5 if job.head_dim <= 128 else 3e-5


@pytest.mark.parametrize("job", SHORT, ids=lambda job: job.label)
def test_attention(jobs, job):
    """Rows of two sequences and padding; what lies beyond a position, or before its window, is NaN."""
    rng = np.random.default_rng(job.m)
    count = 2 * job.pages_per_slot
    inputs = inputs_of(job, rng, pages=count + 1)
    inputs["page_table"][...] = rng.permutation(count).reshape(2, -1)
    inputs["positions"][: job.m] = rng.integers(0, 128, job.m)
    inputs["positions"][0] = 127
    inputs["slots"][: job.m] = rng.integers(0, 2, job.m)
    if job.m > 1:
        inputs["positions"][1] = -1
        inputs["positions"][2] = 0
    rows = np.flatnonzero(inputs["positions"] >= 0)
    for slot, table in enumerate(inputs["page_table"]):
        positions = inputs["positions"][rows][inputs["slots"][rows] == slot]
        seen = np.zeros(128, bool)
        for position in positions.tolist():
            seen[max(0, position + 1 - (job.window or 128)) : position + 1] = True
        for at in np.flatnonzero(~seen).tolist():
            for cache in ("k_cache", "v_cache"):
                inputs[cache][table[at // SIZE], :, at % SIZE] = np.nan
    jobs.check(job, inputs, tolerance(job))


def test_attention_over_32k_positions(jobs):
    rng = np.random.default_rng(2)
    inputs = inputs_of(FULL, rng, pages=2048)
    inputs["page_table"][0] = rng.permutation(2048)
    inputs["positions"][:4] = [32767, -1, 8192, 20011]
    jobs.check(FULL, inputs, 1e-5)


def test_pages_before_the_window_need_not_be_there(jobs):
    """At positions far beyond 8k only the window's pages are there. To read another would end the process.

    So a chunk of a prompt costs by the window, not by what came before it.
    """
    rng, start = np.random.default_rng(4), 30000
    inputs = inputs_of(LONG, rng, pages=40)
    first = (start - 511) // SIZE
    inputs["page_table"][0] = 2**26
    inputs["page_table"][0, first : first + 40] = rng.permutation(40)[: LONG.pages_per_slot - first]
    inputs["positions"][:16] = np.arange(start, start + 16)
    jobs.check(LONG, inputs, 1e-5)


def test_equal_sequences_give_equal_bits(jobs):
    """Whatever rows are beside it, and wherever its pages lie."""
    job = SHORT[0]
    rng = np.random.default_rng(5)
    inputs = inputs_of(job, rng, pages=16)
    inputs["page_table"][...] = np.arange(16).reshape(2, -1)
    for cache in ("k_cache", "v_cache"):
        inputs[cache][8:] = inputs[cache][:8]
    inputs["q"][2] = inputs["q"][0]
    inputs["positions"][:4], inputs["slots"][:4] = [77, 3, 77, 50], [0, 0, 1, 1]
    out = jobs.compute(job, inputs)["out"]
    np.testing.assert_array_equal(out[0], out[2])
