"""Reads calls of models that do not keep to their own format.

They are JSON objects with the name of a tool and its arguments: alone, in a code fence, in a tag such as
<tools>, or with doubled braces. Qwen2.5-Coder writes nearly all of its calls this way, whatever its template
prescribes; that template itself shows a call as {{"name": …}}, with doubled braces.
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
    """The text ends before a decision is possible."""


class _Other(Exception):
    """The text is not a call."""


class Unsure:
    """A decision needs more text."""


UNSURE: Final = Unsure()


@dataclass(frozen=True)
class Opening:
    """The place where the arguments of a call begin.

    `end`: the index where they begin. `closer`: the end of the fence, tag or braces around the call, "" if
    there is none. `listed`: the call is in a list.
    """

    name: str
    end: int
    closer: str
    listed: bool


def candidates(text: str, fresh: bool) -> Iterator[int]:
    """The indices where calls may begin: beginnings of lines. `fresh`: the text begins a line."""
    for found in _LINE.finditer(text):
        if found.start() > 0 or fresh or text.startswith("\n"):
            yield found.end()


def opening(text: str, names: Collection[str]) -> Opening | Unsure | None:
    """The call with which a text begins; None if there is none."""
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
    """The text after a call: the next call in its fence, tag or list, or the length of the text that ends
    these.
    """
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
            while before.closer == "}" and scan.maybe("}"):
                pass  # a model that doubles braces may close more than it has opened
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
    """Scans a text from its beginning."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        self._text, self._names = text, names
        self.at = 0

    def blanks(self) -> None:
        while self.at < len(self._text) and self._text[self.at] in _BLANKS:
            self.at += 1

    def maybe(self, mark: str) -> bool:
        """Whether the mark is next; _More if more text is needed to know."""
        if self._text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        if mark.startswith(self._text[self.at :]):
            raise _More
        return False

    def one_of(self, marks: Collection[str]) -> str:
        """The mark that is next, of marks none of which begins another; _More or _Other if there is none."""
        for mark in marks:
            if self._text.startswith(mark, self.at):
                self.at += len(mark)
                return mark
        rest = self._text[self.at :]
        raise _More if any(mark.startswith(rest) for mark in marks) else _Other

    def wrapper(self) -> str:
        """The end of a fence, a tag or doubled braces with which the text begins, "" if there is none."""
        if self.maybe("{{"):
            self.at -= 1
            return "}"
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
        """The name of the tool; the scan stops where its arguments begin."""
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
