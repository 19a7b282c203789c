"""Paged attention, by class of device."""

from __future__ import annotations

from nearfar.format.sizes import MAX_ROWS
from nearfar.targets.gpu.classes import SOFTWARE, Tuning
from nearfar.targets.jobs import Attend
from nearfar.targets.kernels import Staged

from . import flash_decode, software


def attention(job: Attend, tuning: Tuning) -> Staged:
    """The launches of a job."""
    if tuning.device == SOFTWARE or job.m > MAX_ROWS:
        return software.attention(job)
    return flash_decode.attention(job, tuning.device)
