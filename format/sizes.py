"""Sizes that the format fixes: rows of a step, rows of logits, buckets, tokens in a page."""

from __future__ import annotations

MAX_STEP = 256
"""Rows of the largest bucket: the length of `tokens`, `positions`, `slots`."""
MAX_ROWS = 16
"""Rows of logits, and sequences in flight (slots)."""
STEP_BUCKETS = (1, 4, 16, 64, 256)
"""Rows of the buckets that a build makes for `step`."""
ROW_BUCKETS = (1, 4, 16)
"""Rows of the buckets that a build makes for `greedy`, `sample` and `logprobs`."""
TOP_LOGPROBS = 20
"""The number of likeliest tokens that `logprobs` gives for a row."""
PAGE_SIZE = 16
"""Tokens in a page of the cache."""
WASM_RESERVED = 2 << 20
"""wasm: bytes at the beginning of the memory that belong to the module: its stack and static data."""
WASM_STACK = 256 << 10
"""wasm: bytes of the stack that the host gives to each further thread."""


def pages_for(tokens: int, page_size: int) -> int:
    """The number of pages that hold `tokens` tokens."""
    return -(-tokens // page_size)
