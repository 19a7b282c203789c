"""The numbers of rows that a step can have: a program has a plan for each bucket."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.format.sizes import ROW_BUCKETS, STEP_BUCKETS


@dataclass(frozen=True)
class Buckets:
    """Rows of a step, and rows of logits for the sampler's functions; ascending."""

    step: tuple[int, ...] = STEP_BUCKETS
    rows: tuple[int, ...] = ROW_BUCKETS
