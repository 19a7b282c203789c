"""Translates structural tags (xgrammar's form, see edge_runtime.tools.asking) into llguidance's Lark.

A lexer that takes the longest text cannot look ahead. So text up to a mark is one lexeme with the mark: a
text that ends in the mark and does not have it earlier.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from nearfar.edge_runtime.grammars.schema import narrowed
from nearfar.edge_runtime.grammars.spelled import spelled_out

Tag = dict[str, Any]
ANY = r"[\s\S]"
_META = frozenset("\\.+*?()|[]{}^$/#&~-")


def lark_of(tag: Tag, blanks: Callable[[str], str], side: Callable[[str], str]) -> str:
    """The grammar in llguidance's form of a structural tag's `format`.

    `blanks`: returns the regular expression of blanks in the JSON of a parameter. `side`: translates an EBNF
    into Lark.
    """
    made = _Lark(blanks, side)
    start = made.rule(tag)
    text = "\n".join(["%llguidance {}", f"start: {start}", *made.lines]) + "\n"
    grammars = [{"name": "structural_tag", "lark_grammar": text}, *made.sides]
    return json.dumps({"grammars": grammars})


class _Lark:
    """The rules of one grammar."""

    def __init__(self, blanks: Callable[[str], str], side: Callable[[str], str]) -> None:
        self._blanks, self._side = blanks, side
        self.lines: list[str] = []
        self.sides: list[dict[str, str]] = []
        self._names: dict[str, str] = {}

    def rule(self, tag: Tag) -> str:
        """The Lark expression of a tag."""
        return str(getattr(self, f"_{tag['type']}")(tag))

    def _define(self, body: str, prefix: str) -> str:
        """The name of a rule, or (in capital letters) of a terminal; equal bodies share one."""
        key = f"{prefix} {body}"
        if key not in self._names:
            self._names[key] = f"{prefix}{len(self._names)}"
            self.lines.append(f"{self._names[key]}: {body}")
        return self._names[key]

    def _terminal(self, body: str) -> str:
        return self._define(body, "T")

    def _const_string(self, tag: Tag) -> str:
        return json.dumps(tag["value"])

    def _json_schema(self, tag: Tag) -> str:
        strict, param = tag.get("strict", True), tag.get("param", "response_format")
        schema = spelled_out(narrowed(tag["json_schema"], strict=strict, param=param))
        blanks = self._blanks("response_format" if tag.get("spaced") else param)
        schema = {**schema, "x-guidance": {"whitespace_pattern": blanks}}
        return self._define("%json " + json.dumps(schema), "r")

    def _any_text(self, _: Tag) -> str:
        return self._terminal(f"/{ANY}*/")

    def _regex(self, tag: Tag) -> str:
        return self._terminal("/" + _slashed(tag["pattern"]) + "/")

    def _grammar(self, tag: Tag) -> str:
        if tag["grammar"] == 'root ::= ""':
            return '""'
        name = f"side{len(self.sides)}"
        self.sides.append({"name": name, "lark_grammar": self._side(tag["grammar"])})
        return f"@{name}"

    def _sequence(self, tag: Tag) -> str:
        return self._define(" ".join(map(self.rule, tag["elements"])), "r")

    def _or(self, tag: Tag) -> str:
        return self._define(" | ".join(map(self.rule, tag["elements"])), "r")

    def _tag(self, tag: Tag) -> str:
        return self._after(tag["begin"], tag)

    def _after(self, begin: str, tag: Tag) -> str:
        """A tag of whose beginning only `begin` is left to write."""
        content, end = tag["content"], tag["end"]
        lead = json.dumps(begin) + " " if begin else ""
        if content["type"] == "any_text":
            return self._terminal(lead + (_until([end], [end]) if end else f"/{ANY}*/"))
        return self._define(lead + self.rule(content) + (" " + json.dumps(end) if end else ""), "r")

    def _triggered_tags(self, tag: Tag) -> str:
        """Free text with tags in it."""
        triggers: list[str] = tag["triggers"]
        parts = []
        for trigger in triggers:
            rests = [
                self._after(one["begin"][len(trigger) :], one)
                for one in tag["tags"]
                if one["begin"].startswith(trigger)
            ]
            parts.append(f"{self._terminal(_until([trigger], triggers))} ({' | '.join(rests)})")
        part = self._define(" | ".join(parts), "r")
        free = self._terminal(_without(triggers))
        if tag.get("at_least_one"):
            first = self._define(" | ".join(map(self._tag, tag["tags"])), "r")
            return first if tag.get("stop_after_first") else self._define(f"{first} {part}* {free}", "r")
        return self._define(f"{free} | {part}" if tag.get("stop_after_first") else f"{part}* {free}", "r")

    def _tags_with_separator(self, tag: Tag) -> str:
        one = self._define(" | ".join(map(self._tag, tag["tags"])), "r")
        several = one
        if not tag.get("stop_after_first"):
            several = self._define(f"{one} ({json.dumps(tag['separator'])} {one})*", "r")
        return several if tag.get("at_least_one") else f"({several})?"


def _until(ends: Sequence[str], marks: Sequence[str]) -> str:
    """A terminal of text that ends in one of `ends` and has none of `marks` before."""
    return f"(/{ANY}*({_either(ends)})/ & ~/{ANY}*({_either(marks)}){ANY}+/)"


def _without(marks: Sequence[str]) -> str:
    return f"(/{ANY}*/ & ~/{ANY}*({_either(marks)}){ANY}*/)"


def _either(texts: Sequence[str]) -> str:
    return "|".join("".join(map(_literal, text)) for text in texts)


def _literal(char: str) -> str:
    if char == "\n":
        return "\\n"
    return "\\" + char if char in _META else char


def _slashed(pattern: str) -> str:
    """A regular expression between slashes."""
    made, escaped = [], False
    for char in pattern:
        made.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "".join(made)
