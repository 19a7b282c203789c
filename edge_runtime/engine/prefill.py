"""How prompts share the rows of a step. tests/vectors/prefill/shares.json says the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

LOOKED_AT = 32
"""Waiting requests that are looked at when a step is planned: what comes behind them has to wait its turn."""
OVERTAKEN = 32
"""How many requests may be admitted past one that finds no room for its pages; then that one is next."""


def kept_rows(budget: int) -> int:
    """Rows of a step that are kept for prompts much shorter than the oldest."""
    return budget // 4


def is_short(rows: int, oldest: int) -> bool:
    """Whether a prompt with so many rows to compute may have some of those that are kept."""
    return rows * 2 <= oldest


def share_rows(wanted: Seq[int], budget: int) -> list[int]:
    """Rows for each prompt, the oldest first, of those that it still wants.

    The oldest comes first, so that prompts of one length are computed one after the other, which is soonest
    for all of them. But a quarter of the rows goes to prompts much shorter than the oldest, the shortest
    first: a request of a few words does not wait until all long prompts before it are read, and the oldest
    takes at most a third longer.
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
