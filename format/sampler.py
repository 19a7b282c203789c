"""Columns of the sampler's parameters: `sample_f32` float32 [16, 8] and `sample_i32` int32 [16, 8], a row
a request.
"""

from __future__ import annotations

from enum import IntEnum

COLUMNS = 8


class SampleF32(IntEnum):
    """Columns of `sample_f32`. What is not named is 0."""

    TEMPERATURE = 0
    """0: the argmax."""
    TOP_P = 1
    """1: off."""
    MIN_P = 2
    """0: off."""
    REPETITION_PENALTY = 3
    """1: off."""
    PRESENCE_PENALTY = 4
    """0: off."""
    FREQUENCY_PENALTY = 5
    """0: off."""


class SampleI32(IntEnum):
    """Columns of `sample_i32`. What is not named is 0."""

    SLOT = 0
    """The slot of its sequence; −1: the row is not used, nothing is written."""
    TOP_K = 1
    """0: off."""
    SEED_LOW = 2
    """The low 32 bits of the seed."""
    SEED_HIGH = 3
    """The high 32 bits of the seed."""
    COUNTER = 4
    """The position that the sampled token will have in its sequence."""
    FEED = 5
    """The row of `tokens` that the sampled token is written to; −1: none."""


PROMPT_FLAG = 1 << 24
"""Bit of `counts` that marks a token of the prompt; the bits below count it in the answer."""

COLDEST = 1e-6
"""The least temperature but 0: what is less counts as this."""

BOUND = 2.0**120
"""What a logit divided by its temperature is at most, and at least with a minus: differences of two, and some
times that, are numbers of float32, too.
"""
