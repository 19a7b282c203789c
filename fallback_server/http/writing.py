"""Writes records as JSON in small steps. Long parts of a record are iterators or arrays.

A response with 2,048 vectors of 4,096 numbers is 170 MB of text: writing it at once stopped all other answers
for seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

NUMBERS = 256
"""Numbers of an array that are written at once."""

Encode = Callable[[Any], str]
SHORT: Encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
SPACED: Encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
"""Encoder with blanks, for lines that people read: events of streams, and the output of commands."""


def written(record: Any, encode: Encode = SHORT) -> Iterator[str]:
    """Yield a record as JSON, in short pieces. Iterators and arrays of numbers become lists."""
    try:
        text = encode(record)
    except TypeError:  # the body has an iterator or an array in it, on which the encoder stops
        yield from _long(record, encode)
    else:
        yield text


def _long(record: Any, encode: Encode) -> Iterator[str]:
    before = ""
    if isinstance(record, dict):
        yield "{"
        for name, value in record.items():
            yield f"{before}{encode(name)}:"
            yield from written(value, encode)
            before = ","
        yield "}"
    elif isinstance(record, np.ndarray):
        yield "["
        for start in range(0, len(record), NUMBERS):
            yield before + encode(record[start : start + NUMBERS].tolist())[1:-1]
            before = ","
        yield "]"
    elif isinstance(record, Iterator | list):
        yield "["
        for item in record:
            if before:
                yield before
            yield from written(item, encode)
            before = ","
        yield "]"
    else:
        raise TypeError(f"{type(record).__name__} is not written as JSON")
