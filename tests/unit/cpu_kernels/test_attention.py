"""Attention of the CPU target against NumPy: windows, caps, sinks, head sizes, long contexts.

LLVM takes a third of a CPU second for a job, so a run compiles half of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.kernels.jobs import Attend
from tests.support.cpu_jobs import CpuJobs, inputs_of
from tests.support.turns import share

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
QUANTIZED = [(4, 2, 32), (9, 3, 64), (5, 1, 96), (4, 1, 256)]
SHORT = share([
    *(attend(4, 4, 2, 16, **flags) for flags in FLAGS),
    *(attend(4, *shape, kv_dtype) for shape in SHAPES for kv_dtype in ("float32", "float16")),
    attend(1, 4, 2, 16, window=20), attend(16, 4, 2, 20, "float16", window=9, sinks=True),
    attend(64, 2, 1, 8, window=24),
    *(attend(4, *shape, kv_dtype) for shape in QUANTIZED for kv_dtype in ("int8", "int4")),
    attend(16, 4, 2, 96, "int4", window=9, sinks=True), attend(1, 4, 2, 64, "int8", window=20),
], 2)  # fmt: skip
FLAGGED = share([attend(64, 4, 2, 16, context=1024, **flags) for flags in FLAGS], 2)
TOGETHER = [*FLAGGED, *share([
    *(attend(128, *shape, kv_dtype, 512)
      for shape in [(9, 3, 64), (2, 2, 20), (7, 1, 32), (8, 1, 512)]
      for kv_dtype in ("float32", "float16")),
    attend(256, 6, 3, 24, "float16", 512, window=100),
    *(attend(128, 4, 2, 64, kv_dtype, 512) for kv_dtype in ("int8", "int4")),
    attend(128, 4, 2, 32, "int4", 512, window=100),
], 2)]  # fmt: skip
"""Jobs with so many rows that a task takes several of them."""
ALONE = attend(1, 4, 2, 16, context=1024)
FULL, LONG = attend(4, 2, 1, 16, "float16", 32768), attend(16, 2, 1, 16, "float16", 32768, window=512)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return CpuJobs(
        tmp_path_factory.mktemp("attention"),
        [*SHORT, *TOGETHER, ALONE, dataclasses.replace(ALONE, m=64), FULL, LONG],
    )


def tolerance(job: Attend) -> float:
    """The kernel and the reference read the same cache; sums are float32."""
    return 1e-5 if job.head_dim <= 128 else 3e-5


@pytest.mark.parametrize("job", SHORT, ids=lambda job: job.label)
def test_attention(jobs, job):
    """Rows of two sequences and padding; positions beyond a row's own, or before its window, are NaN."""
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


def prompt(job: Attend, start: int) -> dict[str, Any]:
    """Inputs whose rows are consecutive positions of a prompt from `start` on; pages are NaN outside the
    positions that rows see.
    """
    rng, pages = np.random.default_rng(job.m), job.pages_per_slot
    inputs = inputs_of(job, rng, pages=pages + 3)
    inputs["page_table"][...] = rng.permutation(pages + 3)[:pages]
    inputs["positions"][: job.m] = np.arange(start, start + job.m)
    inputs["slots"][: job.m] = 1
    first = max(0, start + 1 - (job.window or start + 1))
    for at in [*range(first), *range(start + job.m, pages * SIZE)]:
        for cache in ("k_cache", "v_cache"):
            inputs[cache][inputs["page_table"][1, at // SIZE], :, at % SIZE] = np.nan
    return inputs


@pytest.mark.parametrize("job", TOGETHER, ids=lambda job: f"{job.label}_{job.pages_per_slot}")
@pytest.mark.parametrize("start", [0, 37, 250])
def test_rows_of_a_prompt(jobs, job, start):
    """Consecutive rows, which a task may take together."""
    jobs.check(job, prompt(job, start), tolerance(job))


@pytest.mark.parametrize("job", FLAGGED, ids=lambda job: job.label)
def test_rows_of_several_sequences_beside_a_prompt(jobs, job):
    """One step has a prompt, rows of another sequence, padding, and a jump in positions."""
    inputs = inputs_of(job, np.random.default_rng(6), pages=2 * job.pages_per_slot)
    inputs["page_table"][...] = np.arange(2 * job.pages_per_slot).reshape(2, -1)
    inputs["positions"][:64] = [*range(300, 320), *range(12), -1, -1, *range(600, 622), *range(40, 48)]
    inputs["slots"][:64] = [0] * 20 + [1] * 14 + [0] * 22 + [1] * 8
    jobs.check(job, inputs, tolerance(job))


@pytest.mark.parametrize("job", FLAGGED, ids=lambda job: job.label)
def test_rows_taken_together_give_the_bits_of_rows_alone(jobs, job):
    """A row's result does not depend on its neighbours, even if they are NaN."""
    inputs = prompt(job, 200)
    whole = jobs.compute(job, inputs)["out"]
    inputs["positions"][1:64:2] = -1
    alone = jobs.compute(job, inputs)["out"]
    np.testing.assert_array_equal(alone[::2], whole[::2])
    last = inputs["page_table"][1, 263 // SIZE]
    for cache in ("k_cache", "v_cache"):
        inputs[cache][last, :, 263 % SIZE] = np.nan
    inputs["positions"][:64] = np.arange(200, 264)
    np.testing.assert_array_equal(jobs.compute(job, inputs)["out"][:63], whole[:63])


def test_a_row_alone_has_the_bits_that_it_has_among_many(jobs):
    """A single row distributes its positions over tasks, many rows do not; their sums are equal."""
    many, alone = dataclasses.replace(ALONE, m=64), ALONE
    inputs = prompt(many, 700)
    one = {name: array.copy() for name, array in inputs.items()} | {"q": inputs["q"][:1]}
    np.testing.assert_array_equal(jobs.compute(alone, one)["out"][0], jobs.compute(many, inputs)["out"][0])


def test_attention_over_32k_positions(jobs):
    rng = np.random.default_rng(2)
    inputs = inputs_of(FULL, rng, pages=2048)
    inputs["page_table"][0] = rng.permutation(2048)
    inputs["positions"][:4] = [32767, -1, 8192, 20011]
    jobs.check(FULL, inputs, 1e-5)


def test_pages_before_the_window_need_not_be_there(jobs):
    """At positions far beyond 8k only the window's pages exist. Reading another page would end the process.

    So the cost of a chunk of a prompt depends on the window, not on earlier positions.
    """
    rng, start = np.random.default_rng(4), 30000
    inputs = inputs_of(LONG, rng, pages=40)
    first = (start - 511) // SIZE
    inputs["page_table"][0] = 2**26
    inputs["page_table"][0, first : first + 40] = rng.permutation(40)[: LONG.pages_per_slot - first]
    inputs["positions"][:16] = np.arange(start, start + 16)
    jobs.check(LONG, inputs, 1e-5)


def test_equal_sequences_give_equal_bits(jobs):
    """The result depends neither on other rows nor on the places of pages."""
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
