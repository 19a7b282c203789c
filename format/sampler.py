"""Columns of the sampler's parameters: `sample_f32` float32 [16, 8] and `sample_i32` int32 [16, 8], a row a request."""

from __future__ import annotations

from enum import IntEnum

COLUMNS = 8


class SampleF32(IntEnum):
    """Columns of `sample_f32`. What is not named is 0."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION_PENALTY = 3
    PRESENCE_PENALTY = 4
    FREQUENCY_PENALTY = 5


class SampleI32(IntEnum):
    """Columns of `sample_i32`. What is not named is 0."""

    SLOT = 0
    """The request's slot; −1: the row is empty."""
    TOP_K = 1
    SEED_LOW = 2
    SEED_HIGH = 3
    COUNTER = 4
    """The position of the token that is drawn."""
    FEED = 5
    """The row of `tokens` that the drawn token is written to; −1: none."""


PROMPT_FLAG = 1 << 24
"""Bit of `counts` that marks a token of the prompt; the bits below count it in the answer."""
