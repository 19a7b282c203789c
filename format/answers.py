"""How a model marks reasoning and tool calls in what it writes, as data: docs/artifact.md, "Answers"."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Marks:
    """The strings around reasoning, such as <think> and </think>.

    `after`: what stands between `end` and what follows, besides blank lines.
    """

    begin: str
    end: str
    after: str = ""


@dataclass(frozen=True)
class Named:
    """A call that is its name and then its arguments: `before` + name + `after` + arguments.

    `until`: where the name's part ends when it is read, "" for `after`; what stands between them is passed
    over.
    """

    before: str = ""
    after: str = ""
    until: str = ""


@dataclass(frozen=True)
class Spelling:
    """Arguments that are not one JSON object: between `begin` and `end`, each as `before_name` + name +
    `after_name` + value + `after_value`, with `separator` between them.

    `quotes`: the marks around strings, in lists and objects too, whose keys then have none; without them
    values are JSON. `raw`: the text up to `after_value` is the value: a string as it is, the rest as JSON.
    `words`: how true, false and null are written.
    """

    begin: str
    end: str
    before_name: str = ""
    after_name: str = ""
    after_value: str = ""
    separator: str = ""
    quotes: tuple[str, ...] = ()
    raw: bool = False
    words: tuple[str, ...] = ("true", "false", "null")


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: sections between `begin` and `end`, each with a call or a list of them.

    A call is an object of JSON with the keys `name` and `arguments`, or as `named` says; its arguments are an
    object of JSON, or as `spelling` says. `listed`: a list in square brackets stands in a section. `end`
    empty: a section goes on to the end of the answer, or to the next section. `also`: further marks that
    begin a section. `bare`: how an answer begins that is one section without marks, "" where there are none
    such. `blank`: what models put between the marks and what stands between them. `separator`: what they put
    between sections; `repeats`: whether there can be several.
    """

    begin: str = ""
    end: str = ""
    also: tuple[str, ...] = ()
    bare: str = ""
    blank: str = ""
    separator: str = ""
    repeats: bool = False
    listed: bool = False
    name: str = "name"
    arguments: str = "arguments"
    named: Named | None = None
    spelling: Spelling | None = None

    @property
    def many(self) -> bool:
        """Whether an answer can have several calls."""
        return self.listed or self.repeats


@dataclass(frozen=True)
class AnswerFormat:
    """How a model marks the parts of its answers. `family`: the format's name, for people.

    `text`: a mark that begins text for the user, "" where it needs none. `dropped`: marks that mean nothing
    to a reader and are no text.
    """

    family: str = ""
    reasoning: Marks | None = None
    calls: CallFormat | None = None
    text: str = ""
    dropped: tuple[str, ...] = ()


def strings(form: AnswerFormat) -> Iterator[str]:
    """Every string of marks: special tokens that occur in one of them are text."""
    yield from (mark for mark in (form.text, *form.dropped) if mark)
    for record in (form.reasoning, form.calls, form.calls and form.calls.named):
        yield from _strings(record)
    spelling = form.calls and form.calls.spelling
    yield from _strings(spelling)


def _strings(record: Marks | CallFormat | Named | Spelling | None) -> Iterator[str]:
    if record is None:
        return
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        yield from (
            one
            for one in ((value,) if isinstance(value, str) else value if isinstance(value, tuple) else ())
            if one
        )
