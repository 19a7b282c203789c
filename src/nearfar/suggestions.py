"""What may be meant by a name that is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

ALIKE = 0.8
"""From here on a name may be meant, of 1: at difflib's 0.6 `intent` looks like `min_tokens`."""

FEW = 6
"""Up to so many known names are listed where none of them looks like the unknown one."""


def suggested(given: str, names: Iterable[str]) -> str:
    """The name that may be meant, as the end of a sentence; empty where none is close."""
    known, low = {name.lower(): name for name in names}, given.lower()
    mixed = [name for name in known if sorted(name) == sorted(low)]  # rnu: too short to be close to run
    close = mixed or get_close_matches(low, known, 1, ALIKE)
    return f": did you mean {known[close[0]]}?" if close else ""


def advised(unknown: Sequence[str], known: Iterable[str]) -> str:
    """What to do about unknown names: take the one that may be meant, or one of few known ones, or none."""
    names = sorted(known)
    listed = (
        f"; there {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if 0 < len(names) <= FEW else ""
    )
    return suggested(unknown[0], names) or listed or "; leave it out"
