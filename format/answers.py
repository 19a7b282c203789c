"""The marks that a model writes around reasoning and tool calls, as data: docs/artifact.md, "Answers"."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningMarks:
    """The strings around reasoning, such as <think> and </think>.

    `after`: the text between `end` and the answer, besides blank lines.
    """

    begin: str
    end: str
    after: str = ""


@dataclass(frozen=True)
class Named:
    """A call written as its name and then its arguments: `before` + name + `after` + arguments.

    `until`: the text at which a reader ends the name; "" means `after`. Text between the name and `until` is
    skipped.
    """

    before: str = ""
    after: str = ""
    until: str = ""


@dataclass(frozen=True)
class Spelling:
    """Arguments that are not one JSON object: between `begin` and `end`, each as `before_name` + name +
    `after_name` + value + `after_value`, with `separator` between them.

    `quotes`: the marks around strings, in lists and objects too, whose keys are then unquoted; empty: values
    are JSON. `raw`: the value is the text up to `after_value`: strings as they are, other values as JSON.
    `words`: the spellings of true, false and null.
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
    """How calls are written: sections between `begin` and `end`, each with a call or a list of calls.

    A call is a JSON object with the keys `name` and `arguments`, or is written as `named` says; its arguments
    are a JSON object, or are written as `spelling` says. `listed`: a section holds a list in square brackets.
    `end` empty: a section goes on to the next section, or to the end of the answer. `also`: other marks that
    begin a section. `bare`: the beginning of an answer that is one section without marks; "" if there are
    none. `blank`: the text that models put between the marks and a section's content. `separator`: the text
    that they put between sections; `repeats`: whether an answer can have several sections.
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

    `text`: a mark that begins text for the user; "" if text needs none. `dropped`: marks that a reader should
    not see and that are not text.
    """

    family: str = ""
    reasoning: ReasoningMarks | None = None
    calls: CallFormat | None = None
    text: str = ""
    dropped: tuple[str, ...] = ()


def strings(form: AnswerFormat) -> Iterator[str]:
    """Every string in the marks of a format. Special tokens that occur in one of them are text."""
    yield from (mark for mark in (form.text, *form.dropped) if mark)
    for record in (form.reasoning, form.calls, form.calls and form.calls.named):
        yield from _strings(record)
    spelling = form.calls and form.calls.spelling
    yield from _strings(spelling)


def _strings(record: ReasoningMarks | CallFormat | Named | Spelling | None) -> Iterator[str]:
    if record is None:
        return
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        yield from (
            one
            for one in ((value,) if isinstance(value, str) else value if isinstance(value, tuple) else ())
            if one
        )
