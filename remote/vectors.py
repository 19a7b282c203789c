"""Reads vectors from an answer of up to 64 MB in small steps: at once, that stopped all other answers for a
second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any

import numpy as np

from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.edge_runtime.turns import Steps
from nearfar.remote.chunks import ShapeError

_VECTOR = re.compile(rb'("embedding"\s*:\s*)\[([^\[\]{}"]*)\]')
"""Matches a field with a list that has no lists, objects or strings. It matches no text within a string,
whose quotes would be escaped.
"""
TEXT_BYTES = 4096
"""Bytes of a list of numbers that are parsed at once."""


def read_vectors(data: bytes, count: int) -> Steps[tuple[list[Vector], int]]:
    """Return the vectors of an answer in order, and the tokens of their inputs. Raises ShapeError where there
    are not `count` vectors of one length.
    """
    found, others, at = list[Vector](), bytearray(), 0
    for match in _VECTOR.finditer(data):
        others += data[at : match.start()] + match[1] + str(len(found)).encode()
        at = match.end()
        found.append((yield from _numbers(match[2])))
        yield
    record = json.loads(bytes(others + data[at:]))
    try:
        items: list[Any] = sorted(record["data"], key=lambda item: item["index"])
        places = [item["embedding"] for item in items]
        tokens = int(record.get("usage", {}).get("prompt_tokens", 0))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ShapeError(f"no embeddings: {type(error).__name__}") from error
    numbers = all(type(place) is int for place in places) and sorted(places) == [*range(len(found))]
    if not numbers or len(found) != count or len({len(vector) for vector in found}) > 1:
        raise ShapeError(f"{len(places)} vectors of numbers were not given for {count} inputs")
    return [found[place] for place in places], max(tokens, 0)


def _numbers(text: bytes) -> Generator[None, None, Vector]:
    parts, start = list[Vector](), 0
    while start < len(text):
        end = text.find(b",", start + TEXT_BYTES)
        end = len(text) if end < 0 else end
        values = json.loads(b"[" + text[start:end] + b"]")
        if any(type(value) not in (int, float) for value in values):
            raise ShapeError("a vector has a value that is not a number")
        try:
            with np.errstate(over="ignore"):
                parts.append(np.array(values, np.float64).astype(np.float32))
        except OverflowError as error:
            raise ShapeError("a vector has a number that is too large") from error
        start = end + 1
        yield
    return np.concatenate(parts) if parts else np.empty(0, np.float32)
