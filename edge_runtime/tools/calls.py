"""Reads the text of a section into calls: names and arguments."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from nearfar.edge_runtime.tools.nesting import Nesting
from nearfar.edge_runtime.tools.values import SpelledReader, Wrong, json_of, written
from nearfar.format.answers import CallFormat, Named

NAME = re.compile(r"[^ \t\r\n<>\[\](){}|\"',:=]+")
"""A tool's name without quotes."""
BLANKS = " \t\r\n"
"""Characters allowed between the parts of JSON."""


@dataclass(frozen=True)
class Call:
    """A tool's name, and the JSON of its arguments; a call that was cut has the JSON so far."""

    name: str
    arguments: str


def call_id() -> str:
    """Make a unique id for a call."""
    return f"call_{secrets.token_hex(12)}"


def calls_in(text: str, form: CallFormat, tools: Seq[Mapping[str, Any]] = ()) -> tuple[Call, ...] | None:
    """The calls of a section; None if it does not match the format.

    `tools`: the offered tools; their schemas give the types of raw arguments.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    try:
        if form.named is None:
            return _objects(json_of(text), form)
        return _Named(text, form, form.named, schemas).calls()
    except Wrong:
        return None


def _objects(data: Any, form: CallFormat) -> tuple[Call, ...]:
    records = data if form.listed and isinstance(data, list) else [data]
    if not records:
        raise Wrong("no calls")
    return tuple(_object(record, form) for record in records)


def _object(record: Any, form: CallFormat) -> Call:
    """A call from a JSON object. Models sometimes write the other of the two keys for arguments."""
    if not isinstance(record, dict) or not isinstance(record.get(form.name), str):
        raise Wrong("no call")
    arguments: Any = next((record[name] for name in argument_names(form) if name in record), {})
    if isinstance(arguments, str):
        return Call(record[form.name], arguments)
    if not isinstance(arguments, dict):
        raise Wrong("arguments are an object")
    return Call(record[form.name], written(arguments))


def argument_names(form: CallFormat) -> tuple[str, ...]:
    """The keys under which an object may have its arguments."""
    return tuple(dict.fromkeys((form.arguments, "arguments", "parameters")))


class _Named:
    """Reads calls that are a name followed by arguments."""

    def __init__(self, text: str, form: CallFormat, named: Named, schemas: Mapping[str, Any]) -> None:
        self._text, self._form, self._named, self._schemas = text, form, named, schemas
        self._at = 0

    def calls(self) -> tuple[Call, ...]:
        """All calls of the section."""
        if not self._form.listed:
            made = [self._call()]
        else:
            self._take("[")
            made = [self._call()]
            while not self._follows("]"):
                self._take(",")
                made.append(self._call())
            self._take("]")
        self._blanks()
        if self._at != len(self._text):
            raise Wrong("more than calls")
        return tuple(made)

    def _call(self) -> Call:
        self._take(self._named.before)
        self._blanks()
        name = NAME.match(self._text, self._at)
        if name is None:
            raise Wrong("a call without a name")
        self._at = name.end()
        until = self._named.until or self._named.after
        if until:
            found = self._text.find(until, self._at)
            if found < 0:
                raise Wrong(f"{until!r} is missing")
            self._at = found + len(until)
        return Call(name[0], self._arguments(name[0]))

    def _arguments(self, name: str) -> str:
        if self._form.spelling is not None:
            reader = SpelledReader(self._form.spelling, self._text, self._at, self._schemas.get(name))
            made = reader.arguments()
            self._at = reader.at
            return written(made)
        self._blanks()
        given = self._text[self._at :]
        end = Nesting().end(given)
        if end is None or not isinstance(json_of(given[:end]), dict):
            raise Wrong("arguments are an object")
        self._at += end
        return given[:end]

    def _blanks(self) -> None:
        while self._text[self._at : self._at + 1] in tuple(BLANKS):
            self._at += 1

    def _follows(self, mark: str) -> bool:
        self._blanks()
        return self._text.startswith(mark, self._at)

    def _take(self, mark: str) -> None:
        if not self._follows(mark):
            raise Wrong(f"{mark!r} is missing")
        self._at += len(mark)


def begun_call(text: str, form: CallFormat) -> Call | None:
    """The call that a cut section begins: its name, and its JSON arguments so far. None if there is no name
    yet.
    """
    found = _begun_named(text, form, form.named) if form.named else _begun_object(text, form)
    if found is None:
        return None
    name, arguments = found
    # The arguments may be complete, with only the end of the section missing.
    return Call(name, arguments[: Nesting().end(arguments)] if arguments.startswith("{") else "")


def _begun_object(text: str, form: CallFormat) -> tuple[str, str] | None:
    words = "|".join(map(re.escape, argument_names(form)))
    blank = f"[{BLANKS}]*"
    name = rf'[{BLANKS}\[]*\{{{blank}"{re.escape(form.name)}"{blank}:{blank}("(?:[^"\\]|\\.)*")'
    pattern = rf'{name}(?:{blank},{blank}"(?:{words})"{blank}:{blank}(.*))?'
    found = re.compile(pattern, re.DOTALL).match(text)
    try:
        return (json_of(found[1]), found[2] or "") if found else None
    except Wrong:
        return None


def _begun_named(text: str, form: CallFormat, named: Named) -> tuple[str, str] | None:
    start = text.lstrip(BLANKS + "[" if form.listed else BLANKS)
    if not start.startswith(named.before):
        return None
    name = NAME.match(start, len(named.before))
    if name is None or name.end() == len(start):  # without a sign behind it, the name may be incomplete
        return None
    until = named.until or named.after
    found = start.find(until, name.end()) if until else name.end()
    if form.spelling is not None or found < 0:
        return name[0], ""
    return name[0], start[found + len(until) :].lstrip(BLANKS)
