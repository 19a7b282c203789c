"""How many rows a step can have: a program has a plan for each bucket."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.format.sizes import ROW_BUCKETS, STEP_BUCKETS


@dataclass(frozen=True)
class Buckets:
    """Rows that a step can have, and rows of logits that the sampler's functions can; smallest first."""

    step: tuple[int, ...] = STEP_BUCKETS
    rows: tuple[int, ...] = ROW_BUCKETS
