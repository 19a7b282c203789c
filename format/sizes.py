"""Sizes that the artifact format fixes: buckets, rows, cache pages."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEP = 256  # rows of the largest bucket: the length of `tokens`, `positions`, `slots`
MAX_ROWS = 16  # rows of logits, and sequences in flight
STEP_BUCKETS = (1, 4, 16, 64, 256)
ROW_BUCKETS = (1, 4, 16)
TOP_LOGPROBS = 20


@dataclass(frozen=True)
class CacheLayout:
    """The paged KV cache: tokens a page, sequences in flight, pages a sequence can have."""

    context_length: int
    page_size: int = 16
    slots: int = MAX_ROWS

    @property
    def pages_per_slot(self) -> int:
        """Columns of the page table."""
        return -(-self.context_length // self.page_size)
