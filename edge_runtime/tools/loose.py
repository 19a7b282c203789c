"""Calls as models write them that do not keep to their own format: an object of JSON alone, between the lines
of a code fence, or in a tag such as <tools>, with the name of a tool and its arguments.

Qwen2.5-Coder writes nearly all of its calls so, whatever its template tells it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

TAGS: Final = (
    "tool_call", "tool_calls", "tools", "tool", "function_call", "function_calls", "functions", "function",
    "call", "json", "action",
)  # fmt: skip
"""The names of tags that models put around a call."""
WORDS: Final = ("arguments", "parameters")
"""The keys that arguments stand under."""
LEADING: Final = ("type", "id", "call_id", "tool_call_id", "index")
"""Keys of a text or a number that models put before the name, as OpenAI's records of calls have them."""
_SCALAR = re.compile(r'"[^"\\\n]{0,64}"|-?[0-9]{1,20}(?=[^0-9])|true|false|null')
_BEGUN = re.compile(r'"[^"\\\n]{0,64}|-?[0-9]{0,20}|[a-z]{0,4}')
_BLANKS = " \t\r\n"
_FENCE = re.compile(r"```[\w-]{0,20}[ \t]*\r?(\n)?")
_LINE = re.compile(r"(?:^|\n)[ \t]*(?=[`<{\[])")


class _More(Exception):
    """The text ends before it is known."""


class _Other(Exception):
    """The text is no call."""


class Unsure:
    """More text has to come before anything can be said."""


UNSURE: Final = Unsure()


@dataclass(frozen=True)
class Opening:
    """Where the arguments of a call begin. `end`: behind what stands before them. `closer`: what ends the
    fence or the tag around it, "" where there is none; `listed`: it stands in a list.
    """

    name: str
    end: int
    closer: str
    listed: bool


def candidates(text: str, fresh: bool) -> Iterator[int]:
    """Where calls may begin: at the beginning of a line. `fresh`: the text begins one."""
    for found in _LINE.finditer(text):
        if found.start() > 0 or fresh or text.startswith("\n"):
            yield found.end()


def opening(text: str, names: Collection[str]) -> Opening | Unsure | None:
    """The call with which a text begins; None: there is none."""
    scan = _Scan(text, names)
    try:
        closer = scan.wrapper()
        scan.blanks()
        listed = scan.maybe("[")
        name = scan.head()
    except _More:
        return UNSURE
    except _Other:
        return None
    return Opening(name, scan.at, closer, listed)


def following(text: str, names: Collection[str], before: Opening) -> Opening | int | Unsure:
    """What stands behind a call: the next one in its fence, tag or list, or how long what ends these is."""
    scan = _Scan(text, names)
    end = 0
    listed = before.listed
    try:
        scan.blanks()
        comma = scan.maybe(",") if listed or before.closer else False
        scan.blanks()
        if listed and not comma and scan.maybe("]"):
            listed, end = False, scan.at
            scan.blanks()
        if before.closer and not comma and scan.maybe(before.closer):
            return scan.at
        if not (comma or before.closer):
            return end
        try:
            name = scan.head()
        except _Other:
            return end
    except _More:
        return UNSURE
    return Opening(name, scan.at, before.closer, listed)


class _Scan:
    """Reads a text from its beginning, as far as it goes."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        self._text, self._names = text, names
        self.at = 0

    def blanks(self) -> None:
        while self.at < len(self._text) and self._text[self.at] in _BLANKS:
            self.at += 1

    def maybe(self, mark: str) -> bool:
        """Whether the mark stands here; _More where that is not known."""
        if self._text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        if mark.startswith(self._text[self.at :]):
            raise _More
        return False

    def one_of(self, marks: Collection[str]) -> str:
        """The one of the marks that stands here, none of which begins another."""
        for mark in marks:
            if self._text.startswith(mark, self.at):
                self.at += len(mark)
                return mark
        rest = self._text[self.at :]
        raise _More if any(mark.startswith(rest) for mark in marks) else _Other

    def wrapper(self) -> str:
        """What ends what a text begins: a fence, a tag, or nothing ("")."""
        if self._text.startswith("<"):
            tag = self.one_of([f"<{name}>" for name in TAGS])
            return f"</{tag[1:]}"
        if not self.maybe("```"):
            return ""
        found = _FENCE.match(self._text)
        assert found is not None
        self.at = found.end()
        if found[1] is None and self.at == len(self._text):
            raise _More
        return "```"

    def head(self) -> str:
        """The name of the tool, read on to where its arguments begin."""
        self._next("{")
        while self._next('"name"', *(f'"{key}"' for key in LEADING)) != '"name"':
            self._next(":")
            self._scalar()
            self._next(",")
        self._next(":")
        named = {json.dumps(name, ensure_ascii=False): name for name in self._names}
        name = named[self._next(*named)]
        self._next(",")
        self._next(*(f'"{word}"' for word in WORDS))
        self._next(":")
        self.blanks()
        if self.at == len(self._text):
            raise _More
        if self._text[self.at] != "{":
            raise _Other
        return name

    def _scalar(self) -> None:
        self.blanks()
        found = _SCALAR.match(self._text, self.at)
        if found is None:
            raise _More if _BEGUN.fullmatch(self._text, self.at) else _Other
        self.at = found.end()

    def _next(self, *marks: str) -> str:
        self.blanks()
        return self.one_of(marks)
