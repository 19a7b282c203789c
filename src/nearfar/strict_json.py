"""Parses untrusted JSON: nothing is dropped silently, and every fault is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Never

INFINITY = {"__float__": "Infinity"}
"""transformers' way to write an infinite number since its version 5."""


def loads(text: str | bytes, infinite: bool = False) -> Any:
    """Parse like json.loads, but raise ValueError also for duplicate keys, NaN and Infinity, and too deep
    nesting.

    `infinite`: Infinity, which older versions of transformers write, is read as INFINITY.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_infinite if infinite else _refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; ValueError for duplicate keys."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return made


def _infinite(constant: str) -> dict[str, str]:
    return dict(INFINITY) if constant == "Infinity" else _refuse(constant)


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is not a JSON number")
