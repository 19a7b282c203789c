"""Columns of the sampler's parameters: `sample_f32` float32 [16, 8] and `sample_i32` int32 [16, 8], a row for
each request.
"""

from __future__ import annotations

from enum import IntEnum

COLUMNS = 8


class SampleF32(IntEnum):
    """Columns of `sample_f32`. Columns without a name are 0."""

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
    """Columns of `sample_i32`. Columns without a name are 0."""

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
"""The bit of `counts` that marks tokens of the prompt; the bits below count the token in the answer."""

COLDEST = 1e-6
"""The lowest temperature above 0: lower ones count as this one."""

BOUND = 2.0**120
"""The largest absolute value of a logit divided by its temperature, so that differences of two, and small
multiples of them, fit float32.
"""
