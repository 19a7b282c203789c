"""The kernels of all architectures' programs against NumPy, each distinct job by itself.

The programs have about 290 distinct jobs in each precision, which run in turns: a run takes a sixteenth of
them, and at least one of each family (jobs that differ only in sizes).
"""

from __future__ import annotations

import pytest

from nearfar.kernels.contract import Precision
from tests.support import gpu_checks
from tests.support.turns import in_turns

from .gpu_harness import DTYPES, PRECISIONS, TARGETS, about, kernels, runner

PARTS = 16
KINDS = ("embed", "norm", "linear", "rope_append", "attention", "route", "experts", "conv", "delta", "ssm")


@in_turns("target", "precision", "part")
@TARGETS
@PRECISIONS
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_jobs(kind: str, part: int, precision: Precision, target: str) -> None:
    from tests.support import architecture_jobs  # imports transformers

    found = [job for job in architecture_jobs.jobs(DTYPES[precision]) if job.kind == kind]
    made = kernels(target, precision)
    for job in architecture_jobs.part_of(found, part, PARTS):
        with about(job):
            gpu_checks.check(made, runner(target), precision, job)


def test_all_kinds_of_jobs_run() -> None:
    from tests.support import architecture_jobs

    assert {job.kind for job in architecture_jobs.jobs("float32")} == set(KINDS)
