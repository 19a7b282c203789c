"""Parses untrusted JSON: nothing is dropped silently, and every fault is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Never


def loads(text: str | bytes) -> Any:
    """Parse like json.loads, but raise ValueError also for duplicate keys, NaN and Infinity, and too deep
    nesting.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
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


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is not a JSON number")
