"""Paged attention, by class of device."""

from __future__ import annotations

from nearfar.format.sizes import MAX_ROWS
from nearfar.targets.gpu.classes import SOFTWARE, Tuning
from nearfar.targets.jobs import Attend
from nearfar.targets.kernels import Staged

from . import flash_decode, flash_prefill, software


def attention(job: Attend, tuning: Tuning) -> Staged:
    """The launches of a job. As many rows as there may be sequences may each be of another one: of those,
    the positions are shared out; of more, the rows that share positions are put together.
    """
    if tuning.device == SOFTWARE:
        return software.attention(job)
    if job.m <= MAX_ROWS:
        return flash_decode.attention(job, tuning.device)
    return flash_prefill.attention(job, tuning.device)
