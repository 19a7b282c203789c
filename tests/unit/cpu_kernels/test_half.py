"""Float16 caches where a vector unit has no instruction for float16: kernels as for WebAssembly, run here."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.kernels.jobs import Attend, RopeAppend
from tests.support.cpu_jobs import HERE, CpuJobs, inputs_of

APPEND = RopeAppend(64, 2, 1, 32, 16, 2, 8, "float32", "float16", rope=False)
ATTEND = (
    Attend(4, 6, 2, 20, 16, 2, 8, "float32", "float16", scale=0.3),
    Attend(128, 4, 2, 24, 16, 2, 16, "float32", "float16", scale=0.2, window=40, sinks=True),
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    unit = dataclasses.replace(HERE, architecture="wasm32")
    return CpuJobs(tmp_path_factory.mktemp("half"), [APPEND, *ATTEND], unit=unit)


def test_what_is_stored_is_rounded_as_numpy_rounds(jobs):
    """Tests numbers of every size, also halfway between two float16 numbers; numbers beyond the largest
    saturate.
    """
    rng = np.random.default_rng(0)
    inputs = inputs_of(APPEND, rng, pages=16)
    inputs["page_table"][...] = np.arange(16).reshape(2, 8)
    inputs["positions"][:64], inputs["slots"][:64] = np.arange(64), 1
    halves = rng.integers(0, 0x7C00, inputs["x"].shape).astype(np.uint16).view(np.float16).astype(np.float32)
    after = np.nextafter(halves.astype(np.float16), np.float16(np.inf)).astype(np.float32)
    between = (halves + np.where(np.isinf(after), halves, after)) / 2
    x = np.where(rng.random(halves.shape) < 0.5, between, halves * (1 + rng.random(halves.shape) * 1e-3))
    x = np.where(rng.random(halves.shape) < 0.5, -x, x).astype(np.float32)
    x[0, -8:] = [np.nan, np.inf, -np.inf, 65519, 65520, 1e9, 2.0**-24, 2.0**-25]
    inputs["x"] = x
    got = jobs.compute(APPEND, inputs)
    want = np.clip(x, -65504, 65504).astype(np.float16)[:, -32:].reshape(4, 16, 32)
    np.testing.assert_array_equal(got["v_cache"][8:12, 0], want)


@pytest.mark.parametrize("job", ATTEND, ids=lambda job: job.label)
def test_attention_reads_it(jobs, job):
    """Tests small numbers, also below the normal ones, and large ones."""
    inputs = inputs_of(job, np.random.default_rng(1), pages=2 * job.pages_per_slot)
    inputs["page_table"][...] = np.arange(2 * job.pages_per_slot).reshape(2, -1)
    inputs["positions"][: job.m], inputs["slots"][: job.m] = np.arange(job.m) + 70, 0
    inputs["v_cache"][:, :, ::2] *= np.float16(1e-6)
    inputs["v_cache"][:, :, 1::4] *= np.float16(1e4)
    jobs.check(job, inputs, 1e-5)


def test_a_number_that_is_none_stays_so(jobs):
    job = ATTEND[0]
    inputs = inputs_of(job, np.random.default_rng(1), pages=16)
    inputs["page_table"][...] = np.arange(16).reshape(2, -1)
    inputs["positions"][:4], inputs["slots"][:4] = 90, 0
    inputs["v_cache"][2, 0, 3, 5] = np.nan
    out = jobs.compute(job, inputs)["out"].reshape(4, 6, 20)
    assert np.isnan(out).sum() == np.isnan(out[:, :3, 5]).sum() == 4 * 3
