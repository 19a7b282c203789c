"""What is wrong with a text that should be JSON, in words for its author."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from nearfar.fallback_server.http.words import SHOWN, printable

_AT = re.compile(r"(.*) at line (\d+) column (\d+)", re.DOTALL)
_WORD = re.compile(r"[\w+.-]{1,20}")
_PAIR = r"half of a surrogate pair (\uD800 to \uDFFF) is alone in a string before {at}, and no text has that"
TOO_DEEP = "it is nested too deeply"
_NO_UTF8 = "its bytes are not UTF-8 at {at}"
_SAID = {
    "unexpected end of hex escape": _PAIR,
    "lone leading surrogate in hex escape": _PAIR,
    "invalid unicode code point": _NO_UTF8,
    "expected `:`": "a colon must be behind a field's name at {at}, not {found}",
    "expected `,` or `}`": "a comma or the end of the object must be at {at}, not {found}",
    "expected `,` or `]`": "a comma or the end of the list must be at {at}, not {found}",
    "recursion limit exceeded": TOO_DEEP,
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


def read_json(text: bytes) -> Any:
    """Return the value that a JSON text stands for. Raises ValueError with words for the text's author."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(_said(text, str(error))) from error


def _said(text: bytes, message: str) -> str:
    """Say what is wrong with a text. `message`: what the parser says, pydantic's from_json."""
    what, at, found = message, "", ""
    if match := _AT.fullmatch(message):
        what, line, column = match[1], int(match[2]), int(match[3])
        before, rest = _cut(text.split(b"\n", line)[line - 1], max(0, column - 1))
        if before == "-":
            column, rest = column - 1, f"-{rest}"
        at = f"line {line}, column {column}"
        found = word[0] if (word := _WORD.match(rest)) else rest[:1]
    here = f"'{printable(found)}'" if found else "the end"
    if found.lstrip("+-") in _NO_NUMBERS:
        return f"JSON has no {found} ({at}): send null, or leave the field out"
    if found in _NO_WORDS:
        return f"{found} is {_NO_WORDS[found]} in JSON ({at})"
    if found == "\ufffd" and not _is_utf8(text):
        return _NO_UTF8.format(at=at)
    return _SAID[what].format(at=at, found=here) if what in _SAID else f"{what}, at {at}"


def _cut(line: bytes, at: int) -> tuple[str, str]:
    """Return the character before a place in a line, and the text that begins there."""
    before = line[at - 1 : at] if at else b""
    return before.decode(errors="replace"), line[at : at + SHOWN].decode(errors="replace")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
