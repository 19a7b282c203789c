"""Divides the rows of a step among prompts. tests/vectors/prefill/shares.json fixes this for every engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

LOOKED_AT = 32
"""The number of waiting requests considered when a step is planned; later ones wait for their turn."""
OVERTAKEN = 32
"""The most requests admitted before one for which there were no pages; after that, this one is next."""


def kept_rows(budget: int) -> int:
    """Rows of a step that are reserved for prompts much shorter than the oldest one."""
    return budget // 4


def is_short(rows: int, oldest: int) -> bool:
    """Whether a prompt with `rows` rows to compute may use the reserved rows."""
    return rows * 2 <= oldest


def share_rows(wanted: Seq[int], budget: int) -> list[int]:
    """Divide `budget` rows among prompts: `wanted` has the rows that each still needs, the oldest prompt
    first.

    The oldest prompt comes first, so that prompts of equal length are computed one after the other, which
    finishes each of them as early as possible. A quarter of the rows goes to prompts much shorter than the
    oldest, the shortest first: a request of a few words does not wait until all long prompts before it are
    read, and the oldest takes at most a third longer.
    """
    shares = [0] * len(wanted)
    kept = kept_rows(budget)
    for index in sorted(range(1, len(wanted)), key=wanted.__getitem__):
        if not is_short(wanted[index], wanted[0]):
            break
        shares[index] = min(wanted[index], kept)
        kept -= shares[index]
    left = budget - sum(shares)
    for index, rows in enumerate(wanted):
        more = min(rows - shares[index], left)
        shares[index] += more
        left -= more
    return shares
