"""Reads the arguments of a call as a model wrote them: as JSON, or in a Spelling; Wrong if they
are neither.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.format.answers import Spelling

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_BLANKS = re.compile(r"[ \t\r\n]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_DEPTH = 64


class Wrong(Exception):
    """The text does not match its format."""


@dataclass(frozen=True)
class Verbatim:
    """A value with its JSON text: a float does not keep every digit of a number."""

    json: str


def written(value: Any) -> str:
    """The JSON text of a value."""
    if isinstance(value, Verbatim):
        return value.json
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        members = (f"{json.dumps(name, ensure_ascii=False)}: {written(one)}" for name, one in value.items())
        return f"{{{', '.join(members)}}}"
    return json.dumps(value, ensure_ascii=False)


def json_of(text: str) -> Any:
    """The value of a JSON text; Wrong if it is not JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Wrong(str(error)) from error


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    """A finite number; a number too large for a float, which would become Infinity, is refused."""
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits} is too large")
    return number


class SpelledReader:
    """Reads arguments from a place in a text on. `schema`: the tool's, if known: tells which raw texts are
    strings.
    """

    def __init__(
        self, spelling: Spelling, text: str, at: int, schema: Mapping[str, Any] | None = None
    ) -> None:
        self._spelling, self._text, self.at = spelling, text, at
        self._properties: Mapping[str, Any] = (schema or {}).get("properties") or {}

    def arguments(self) -> dict[str, Any]:
        """Read all arguments; `at` is then after their end."""
        s = self._spelling
        self._take(s.begin)
        made: dict[str, Any] = {}
        while not self._follows(s.end):
            if made and s.separator:
                self._take(s.separator.strip())
            self._take(s.before_name)
            name = self._until(s.after_name.rstrip())
            if not name:
                raise Wrong("an argument without a name")
            if s.raw:
                made[name] = self._raw(name)
            else:
                made[name] = self._value(0)
                self._take(s.after_value.strip())
        self._take(s.end)
        return made

    def _raw(self, name: str) -> Any:
        """The text up to the mark, without the line breaks around it, as a value of its schema's type."""
        text = self._until(self._spelling.after_value.strip())
        text = text.removeprefix("\n").removesuffix("\n")
        schema = self._properties.get(name)
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds == ["string"]:
            return text
        try:
            json_of(text)
        except Wrong:
            if kinds is not None and "string" not in kinds:
                raise
            return text
        return Verbatim(text.strip())

    def _value(self, depth: int) -> Any:
        if depth > _DEPTH:
            raise Wrong("nested too deeply")
        self._blanks()
        quotes = self._spelling.quotes
        if quotes and self._text.startswith(quotes[0], self.at):
            self.at += len(quotes[0])
            return self._until(quotes[1])
        char = self._text[self.at : self.at + 1]
        if char in ('"', "'") and char:
            return self._string(char)
        if char == "[":
            return self._list(depth)
        if char == "{":
            return self._object(depth)
        return self._word()

    def _list(self, depth: int) -> list[Any]:
        self.at += 1
        made: list[Any] = []
        while not self._follows("]"):
            if made:
                self._take(",")
            made.append(self._value(depth + 1))
        self._take("]")
        return made

    def _object(self, depth: int) -> dict[str, Any]:
        self.at += 1
        made: dict[str, Any] = {}
        while not self._follows("}"):
            if made:
                self._take(",")
                self._blanks()
            begun = self._text[self.at : self.at + 1]
            quotes = self._spelling.quotes
            if begun in ('"', "'") or (quotes and self._text.startswith(quotes[0], self.at)):
                name = self._value(depth + 1)
                self._take(":")
            else:
                name = self._until(":")
            made[name] = self._value(depth + 1)
        self._take("}")
        return made

    def _string(self, quote: str) -> str:
        self.at += 1
        made: list[str] = []
        while True:
            char = self._text[self.at : self.at + 1]
            self.at += 1
            if not char:
                raise Wrong("a string without an end")
            if char == quote:
                return "".join(made)
            made.append(self._escaped() if char == "\\" else char)

    def _escaped(self) -> str:
        char = self._text[self.at : self.at + 1]
        self.at += 1
        if char != "u":
            return _ESCAPES.get(char, char)
        digits = self._text[self.at : self.at + 4]
        self.at += 4
        if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise Wrong("an escape that is none")
        return chr(int(digits, 16))

    def _word(self) -> Any:
        words = {word: value for value, word in zip((True, False, None), self._spelling.words, strict=True)}
        words |= {"true": True, "false": False, "null": None}
        found = re.compile(r"[A-Za-z]+").match(self._text, self.at)
        if found and found[0] in words:
            self.at = found.end()
            return words[found[0]]
        number = _NUMBER.match(self._text, self.at)
        if number is None:
            raise Wrong("neither a string nor a number")
        self.at = number.end()
        return Verbatim(number[0])

    def _blanks(self) -> None:
        found = _BLANKS.match(self._text, self.at)
        self.at = found.end() if found else self.at

    def _follows(self, mark: str) -> bool:
        self._blanks()
        if self.at >= len(self._text):
            raise Wrong("the arguments do not end")
        return self._text.startswith(mark, self.at)

    def _take(self, mark: str) -> None:
        self._blanks()
        if not self._text.startswith(mark, self.at):
            raise Wrong(f"{mark!r} is missing")
        self.at += len(mark)

    def _until(self, mark: str) -> str:
        end = self._text.find(mark, self.at)
        if end < 0 or not mark:
            raise Wrong(f"{mark!r} is missing")
        text = self._text[self.at : end]
        self.at = end + len(mark)
        return text
