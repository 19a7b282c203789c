"""Suggests names for an unknown one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

ALIKE = 0.8
"""The least similarity (0 to 1) of a suggestion: at difflib's 0.6 `intent` resembles `min_tokens`."""

FEW = 6
"""The most known names that are listed where none resembles the unknown one."""


def suggested(given: str, names: Iterable[str]) -> str:
    """The most similar name, as the end of a sentence; empty where none is similar."""
    known, low = {name.lower(): name for name in names}, given.lower()
    mixed = [name for name in known if sorted(name) == sorted(low)]  # rnu is too short to be similar to run
    close = mixed or get_close_matches(low, known, 1, ALIKE)
    return f": did you mean {known[close[0]]}?" if close else ""


def advised(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Advice about unknown names, as the end of a sentence: a similar name, the known ones if they are few,
    or to leave the name out.
    """
    names = sorted(known)
    listed = (
        f"; there {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if 0 < len(names) <= FEW else ""
    )
    return suggested(unknown[0], names) or listed or "; leave it out"
