"""Reads a body as strict JSON: no NaN, no half surrogate pairs, no deep nesting. Errors say where the body is
wrong and what it has there.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic_core import from_json

from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.words import printable

_LOOKED_INTO = (dict, list, float)
_AT = re.compile(r"(.*) at line (\d+) column (\d+)", re.DOTALL)
_WORD = re.compile(rb"[\w+.-]{1,20}")
_TOO_DEEP = "recursion limit exceeded"
_PAIR = r"half of a surrogate pair (\uD800 to \uDFFF) is alone in a string before {at}, and no text has that"
_SAID = {
    "unexpected end of hex escape": _PAIR,
    "lone leading surrogate in hex escape": _PAIR,
    "invalid unicode code point": "its bytes are not UTF-8 at {at}",
    "EOF while parsing a value": "it ends at {at}, where a value is missing",
    "EOF while parsing a string": "it ends at {at}, inside a string",
    "EOF while parsing an object": "it ends at {at}, inside an object",
    "EOF while parsing a list": "it ends at {at}, inside a list",
    "trailing characters": "there is more text behind the value, at {at}: {found}",
    "trailing comma": "there is a comma and no value behind it, before {at}",
    "key must be a string": "a field's name must be in double quotes at {at}, not {found}",
    "expected value": "a value must be at {at}, not {found}",
    "expected ident": "a word before {at} is not a value: JSON knows the words true, false and null",
    "invalid number": "the number is wrong before {at}, at {found}",
    "number out of range": "a number has too many digits, up to {at}",
    "invalid escape": r"a string has an unknown escape at {at}: JSON knows \n, \", \\, \u00e9 and a few more",
    r"control character (\u0000-\u001F) found while parsing a string": (
        r"a string has a control character before {at}: escape it, for example as \n"
    ),
}  # fmt: skip
"""The parser's messages in words for the author of the JSON, with the place and the text found there."""
_NO_WORDS = {"None": "null", "True": "true", "False": "false"}
_NO_NUMBERS = ("NaN", "Infinity", "nan", "inf", "undefined")


def parsed(body: bytes, depth: int) -> Any:
    """Return the value of a body. Raises ApiError with 400 for invalid JSON, and for lists and objects that
    are nested more than `depth` levels deep.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise _invalid(_said(body, str(error), depth)) from error
    _check_nest(data, depth)
    return data


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, None, "invalid_json")


def _said(body: bytes, message: str, depth: int) -> str:
    """Say what is wrong with a body. `message`: what the parser says."""
    what, at, found = message, "", b""
    if match := _AT.fullmatch(message):
        what, line, column = match[1], int(match[2]), int(match[3])
        at = f"line {line}, column {column}"
        text = body.split(b"\n", line)[line - 1][max(0, column - 1) :]
        found = word[0] if (word := _WORD.match(text)) else text[:1]
    if what == _TOO_DEEP:
        return _deep(depth)
    name = found.decode(errors="replace")
    here = f"'{printable(name)}'" if name else "the end"
    if name.lstrip("+-") in _NO_NUMBERS:
        said = f"JSON has no {name} ({at}): send null, or leave the field out"
    elif name in _NO_WORDS:
        said = f"{name} is {_NO_WORDS[name]} in JSON ({at})"
    else:
        said = _SAID[what].format(at=at, found=here) if what in _SAID else f"{what}, at {at}"
    return f"the body is not valid JSON: {said}"


def _deep(depth: int) -> str:
    return f"the body is nested more than {depth} levels deep"


def _check_nest(data: Any, depth: int) -> None:
    """Raise ApiError for data that is nested too deeply, or has numbers that JSON cannot represent
    (1e999).
    """
    level = [data]
    for _ in range(depth + 1):
        if any(type(item) is float and not math.isfinite(item) for item in level):
            raise _invalid("the body has a number that is too large")
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            # token ids, of which a body may have a million, are none of these types
            if type(child) in _LOOKED_INTO
        ]
        if not level:
            return
    raise _invalid(_deep(depth))
