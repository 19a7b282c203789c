"""What may be meant by a name that is none."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggested(given: str, names: Iterable[str]) -> str:
    """The name that may be meant, as the end of a sentence; empty where none is close."""
    close = get_close_matches(given, list(names), 1)
    return f": did you mean {close[0]}?" if close else ""
