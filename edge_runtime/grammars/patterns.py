"""Decides which regular expressions in a JSON schema grammars can enforce."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

ANCHORS = (codes.AT_BEGINNING, codes.AT_END)
PLAIN = (codes.ANY, codes.NOT_LITERAL)


def why_not(pattern: Any) -> str | None:
    """The reason why a pattern cannot be enforced; None if it can.

    xgrammar matches a pattern against the whole string and ignores lookarounds. It writes characters as they
    are, so a character that JSON escapes would end the string. The text of the pattern must mean the same to
    Python's parser.
    """
    if not isinstance(pattern, str):
        return "it must be a regular expression"
    try:
        tree = parser.parse(pattern)
    except (re.error, OverflowError) as error:
        return f"{error}"
    if tree.state.flags != re.UNICODE.value:
        return "flags inside it are not taken"
    return _top(list(tree))


def slow(pattern: str) -> str | None:
    """The reason why Python's backtracking may take long with a pattern; None if it does not.

    The pattern must be one that `why_not` accepts.
    """
    return None if _repeats(parser.parse(pattern)) <= 2 else "with properties it has too many repeats"


def _repeats(nodes: Iterable[Any]) -> float:
    """The number of repeats in sequence; infinite for a repeat of more than a single character, which may
    never end.
    """
    count = 0.0
    for code, value in nodes:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            single = len(value[2]) == 1 and value[2][0][0] in (*PLAIN, codes.LITERAL, codes.IN)
            count += 1 if single else math.inf
        elif code is codes.SUBPATTERN:
            count += _repeats(value[3])
        elif code is codes.BRANCH:
            count += sum(_repeats(branch) for branch in value[1])
    return count


def _top(nodes: list[Any]) -> str | None:
    """Check that anchors are only at the ends of the whole pattern, or of each of its alternatives; return
    the reason if not.
    """
    if nodes and nodes[0] == (codes.AT, codes.AT_BEGINNING):
        nodes = nodes[1:]
    if nodes and nodes[-1] == (codes.AT, codes.AT_END):
        nodes = nodes[:-1]
    if len(nodes) == 1 and nodes[0][0] is codes.BRANCH:
        return _first(_top(list(branch)) for branch in nodes[0][1][1])
    return _sequence(nodes)


def _sequence(nodes: Iterable[Any]) -> str | None:
    return _first(_node(*node) for node in nodes)


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _node(code: Any, value: Any) -> str | None:
    if code is codes.LITERAL:
        return (
            "a quote, a backslash or a control character in it cannot be enforced"
            if _escaped(value)
            else None
        )
    if code in PLAIN:
        return None
    if code is codes.IN:
        return _class(value)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        return _sequence(value[2])
    if code is codes.SUBPATTERN:
        _, add, remove, inner = value
        return "flags inside it are not taken" if add or remove else _sequence(inner)
    if code is codes.BRANCH:
        return _first(_sequence(branch) for branch in value[1])
    if code is codes.AT:
        return "^ and $ are only enforced at its ends, \\b nowhere"
    return _NOT_REGULAR.get(code, f"{str(code).lower()} cannot be enforced")


_NOT_REGULAR = {
    codes.ASSERT: "what looks around, (?=…) and (?<=…), cannot be enforced",
    codes.ASSERT_NOT: "what looks around, (?!…) and (?<!…), cannot be enforced",
    codes.GROUPREF: "a reference back to a group cannot be enforced",
    codes.GROUPREF_EXISTS: "a condition on a group cannot be enforced",
}
"""Constructs that no regular language has, in words for the author of the pattern."""


def _class(items: Sequence[Any]) -> str | None:
    """Check a character class; return the reason if it has a control character.

    Quotes and backslashes are left out of classes, which makes them narrower.
    """
    if items[0][0] is codes.NEGATE:
        return None
    for code, value in items:
        low = value if code is codes.LITERAL else value[0] if code is codes.RANGE else 0x20
        if low < 0x20:
            return "a control character in it cannot be enforced"
    return None


def _escaped(char: int) -> bool:
    return char < 0x20 or char in (0x22, 0x5C)
