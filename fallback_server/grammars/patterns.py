"""Which regular expressions in a JSON schema xgrammar keeps to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

ANCHORS = (codes.AT_BEGINNING, codes.AT_END)
PLAIN = (codes.ANY, codes.NOT_LITERAL)


def why_not(pattern: Any) -> str | None:
    """Why a pattern cannot be kept to; None: it can.

    xgrammar matches it with the whole string and passes over what looks around. Its characters are written as
    they are, so those that JSON escapes would end the string. The text of the pattern must mean the same to
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


def _top(nodes: list[Any]) -> str | None:
    """At the ends of the whole pattern, or of each of its alternatives, stand the only anchors."""
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
            "a quote, a backslash or a control character in it cannot be kept to" if _escaped(value) else None
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
        return "^ and $ are only kept to at its ends, \\b nowhere"
    return f"{str(code).lower()} cannot be kept to"


def _class(items: Sequence[Any]) -> str | None:
    """Quotes and backslashes are left out of classes, which is narrower; control characters are not."""
    if items[0][0] is codes.NEGATE:
        return None
    for code, value in items:
        low = value if code is codes.LITERAL else value[0] if code is codes.RANGE else 0x20
        if low < 0x20:
            return "a control character in it cannot be kept to"
    return None


def _escaped(char: int) -> bool:
    return char < 0x20 or char in (0x22, 0x5C)
