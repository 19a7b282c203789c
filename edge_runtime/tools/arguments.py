"""Reads the arguments of earlier calls, which models wrote and limits may have cut, as far as
they are JSON.

A call that `max_tokens` cut returns with its conversation in every later turn. A refusal would make the
conversation useless, so the readable part of the arguments is kept (tests/vectors/tools/messages.json).
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

_CLOSING = {"{": "}", "[": "]"}


def arguments_of(text: str) -> dict[str, Any]:
    """The object in a JSON text.

    A text that was cut is read with open strings and brackets closed, or else without its last part. A text
    that is not an object gives an object without members.
    """
    if (found := _read(text)) is not None:
        return found
    whole, cut = _completed(text)
    found = _read(whole)
    return (_read(cut) if found is None else found) or {}


def _read(text: str) -> dict[str, Any] | None:
    """The object in a JSON text, empty for other values; None if it is not JSON."""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else {}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and Infinity are valid for Python's parser, but not in JSON


def _completed(text: str) -> tuple[str, str]:
    """The text with control characters in strings escaped and everything open closed; and a second, shorter
    one.

    The second text ends before the last comma, or after the last open bracket.
    """
    made: list[str] = []
    closing: list[str] = []  # the brackets that close the open ones
    safe, closed = 0, list[str]()  # length of the second text, and the brackets that close it
    in_string = escaped = False
    for char in text:
        if in_string:
            made.append(f"\\u{ord(char):04x}" if char < " " else char)
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
            continue
        if char == ",":
            safe, closed = len(made), []
        made.append(char)
        in_string = char == '"'
        if char in _CLOSING:
            closing.append(_CLOSING[char])
            safe, closed = len(made), []
        elif closing and char == closing[-1]:
            closed.append(closing.pop())
    if escaped:
        made.pop()
    end = "".join(reversed(closing))
    open_there = "".join(reversed([*closing, *reversed(closed)]))
    return "".join(made) + ('"' if in_string else "") + end, "".join(made[:safe]) + open_there
