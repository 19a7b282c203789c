"""Norms, rotation and append of the CPU target against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.errors import BuildError
from nearfar.kernels.jobs import RopeAppend
from tests.support.cpu_jobs import KERNELS, CpuJobs, inputs_of
from tests.support.turns import paired

CONTEXT, PAGES = 160, 24


def rope(m: int, heads: int, kv_heads: int, d: int, kv_dtype: str = "float32", **options: Any) -> RopeAppend:
    return RopeAppend(m, heads, kv_heads, d, 16, 2, CONTEXT // 16, "float32", kv_dtype, **options)


NORMS: tuple[dict[str, Any], ...] = (
    {}, {"norm_eps": 1e-6}, {"norm_eps": 1e-2, "norm_after": True}, {"norm_eps": 1e-5, "norm_all": True},
    {"norm_eps": 1e-5, "norm_all": True, "norm_after": True},
)  # fmt: skip
MORE: tuple[dict[str, Any], ...] = (
    {}, {"rope": False}, {"append": False}, {"rope": False, "append": False},
    {"q_scale": (0.1, 16.0)}, {"v_norm_eps": 1e-2}, {"append": False, "q_scale": (0.25, 50.0)},
)  # fmt: skip
SHAPES = ((1, 9, 3, 64), (16, 4, 1, 80), (4, 5, 5, 6), (1, 2, 1, 256), (64, 3, 3, 20))
SCALED = (rope(4, 4, 2, 8, norm_eps=1e-6), rope(4, 4, 2, 8, norm_eps=1e-2, norm_after=True))
JOBS = [
    *dict.fromkeys((*SCALED, *(rope(4, 4, 2, 8, **norm, **more) for more, norm in paired(MORE, NORMS)))),
    *(rope(m, heads, kv_heads, d, kv_dtype, norm_eps=1e-6)
      for kv_dtype in ("float32", "float16")
      for m, heads, kv_heads, d in SHAPES),
    rope(16, 4, 2, 16, "float16"),
    rope(16, 4, 2, 16, "float16", norm_eps=1e-6, v_norm_eps=1e-6, q_scale=(0.1, 8.0)),
    *(rope(16, 4, 2, d, kv_dtype, norm_eps=1e-6, v_norm_eps=1e-6)
      for d in (32, 64, 96) for kv_dtype in ("int8", "int4")),
    *(rope(16, 4, 2, d, kv_dtype, rope=False) for d in (32, 192) for kv_dtype in ("int8", "int4")),
]  # fmt: skip


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return CpuJobs(tmp_path_factory.mktemp("rope"), JOBS)


def name(job: RopeAppend) -> str:
    return job.label


@pytest.mark.parametrize("job", JOBS, ids=name)
def test_rope_append(jobs, job):
    """Rows of two sequences and padding: q is an output, keys and values go to their pages, all else stays
    unchanged.
    """
    rng = np.random.default_rng(job.m)
    inputs = inputs_of(job, rng, pages=PAGES, context=CONTEXT)
    inputs["positions"][: job.m] = rng.permutation(CONTEXT)[: job.m]
    if job.append:
        inputs["page_table"][...] = rng.permutation(PAGES)[: 2 * (CONTEXT // 16)].reshape(2, -1)
        inputs["slots"][: job.m] = rng.integers(0, 2, job.m)
    if job.m > 1:
        inputs["positions"][1] = -1
    jobs.check(job, inputs, 3e-6)


def test_the_table_is_used_as_it_is(jobs):
    """Yarn scales cosines and sines: a norm before the rotation keeps the factor, one after it does not."""
    for job in SCALED:
        inputs = inputs_of(job, np.random.default_rng(3), pages=PAGES, context=CONTEXT)
        inputs["positions"][:4] = [0, 33, 100, 159]
        inputs["rope"] *= np.float32(1.4)
        jobs.check(job, inputs, 3e-6)


def test_what_a_float16_cache_cannot_hold_saturates(jobs):
    """NaN stays NaN."""
    job = rope(16, 4, 2, 16, "float16")
    inputs = inputs_of(job, np.random.default_rng(6), pages=PAGES, context=CONTEXT)
    inputs["positions"][:3] = [7, 8, 9]
    inputs["x"][0] *= np.float32(1e6)
    inputs["x"][2, 4 * 16 :] = np.nan
    jobs.check(job, inputs, 3e-6)
    got = jobs.compute(job, inputs)
    assert {
        float(got[name].max(where=np.isfinite(got[name]), initial=0)) for name in ("k_cache", "v_cache")
    } == {65504}
    assert np.isnan(got["v_cache"]).sum() == np.isnan(got["k_cache"]).sum() == 2 * 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 7}, "even head_dim, this model has 7"),
        ({"page_size": 12}, "page_size that is a multiple of 16, not 12"),
        ({"dtype": "float16"}, "float32 activations only, not float16"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused(change, message):
    shape = {
        "m": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "page_size": 16,
        "slots": 2,
        "pages_per_slot": 4,
    }
    with pytest.raises(BuildError, match=message):
        KERNELS.stages(RopeAppend(**({"dtype": "float32", "kv_dtype": "float32"} | shape | change)))
