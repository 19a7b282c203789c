"""What a model marks in its text: reasoning and tool calls. Text comes piece by piece and is taken apart on the way."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nearfar.fallback_server.engines.base import ToolCall


@dataclass(frozen=True)
class Marks:
    """The strings around reasoning, such as <think> and </think>."""

    begin: str
    end: str


@dataclass(frozen=True)
class CallFormat:
    """How a model writes tool calls: JSON with `arguments` under this name, between `begin` and `end`.

    `end` empty: up to the end of the answer. `listed`: an array of calls stands there.
    """

    begin: str
    end: str
    arguments: str = "arguments"
    listed: bool = False


HERMES = CallFormat("<tool_call>", "</tool_call>")
MISTRAL = CallFormat("[TOOL_CALLS]", "", listed=True)
LLAMA = CallFormat("<|python_tag|>", "", arguments="parameters")
FORMATS = (HERMES, MISTRAL, LLAMA)
THINK = Marks("<think>", "</think>")

VISIBLE = (*(mark for form in FORMATS for mark in (form.begin, form.end) if mark), THINK.begin, THINK.end)
"""Special tokens of some models that must not be lost when tokens become text."""


def call_format(template: str) -> tuple[CallFormat, bool]:
    """The format that a chat template shows its model, and whether the template writes out `tools` itself."""
    knows = "tools" in template
    found = next((form for form in FORMATS if form.begin in template), None)
    if found is None:
        found = LLAMA if knows and '"parameters"' in template else HERMES
    return found, knows


@dataclass(frozen=True)
class Fragment:
    """A piece of text by kind; the text of a `call` is what stands between the marks."""

    kind: Literal["text", "reasoning", "call"]
    text: str


class MarkupSplitter:
    """Takes a text apart while it comes. What may be the beginning of a mark is held back until that is certain."""

    def __init__(self, reasoning: Marks | None, calls: CallFormat | None, *, reasoning_open: bool = False) -> None:
        self._reasoning, self._calls = reasoning, calls
        self._kind: Literal["text", "reasoning", "call"] = "reasoning" if reasoning and reasoning_open else "text"
        self._held = ""
        self._strip = False

    def push(self, text: str) -> list[Fragment]:
        """What this text makes certain."""
        self._held += text
        return list(self._split())

    def finish(self) -> list[Fragment]:
        """What was held back, for the text ends here. An open call is a call only where its format has no end mark."""
        held, self._held = self._held, ""
        if self._kind != "call":
            return [Fragment(self._kind, held)] if held else []
        assert self._calls is not None
        if not self._calls.end:
            return [Fragment("call", held)]
        return [Fragment("text", self._calls.begin + held)]

    def _split(self) -> Iterator[Fragment]:
        while True:
            if self._strip:  # the blank lines behind a section belong to it
                self._held = self._held.lstrip("\n")
                self._strip = not self._held
            marks = self._next_marks()
            found = min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None)
            if found is None:
                if self._kind != "call":
                    keep = max((overlap(self._held, mark) for mark in marks), default=0)
                    out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                    if out:
                        yield Fragment(self._kind, out)
                return
            at, mark = found
            if at or self._kind == "call":
                yield Fragment(self._kind, self._held[:at])
            self._held = self._held[at + len(mark) :]
            self._switch(mark)

    def _next_marks(self) -> list[str]:
        """The marks that end what comes now."""
        if self._kind == "reasoning":
            return [self._reasoning.end] if self._reasoning else []
        if self._kind == "call":
            return [self._calls.end] if self._calls and self._calls.end else []
        return ([self._reasoning.begin] if self._reasoning else []) + ([self._calls.begin] if self._calls else [])

    def _switch(self, mark: str) -> None:
        if self._kind != "text":
            self._kind, self._strip = "text", True
        else:
            self._kind = "reasoning" if self._reasoning and mark == self._reasoning.begin else "call"
            self._strip = True


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that begins the mark."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def parse_calls(text: str, form: CallFormat, first: int) -> tuple[ToolCall, ...] | None:
    """The calls that stand in a call section, numbered from `first`; None if it is not what the format says."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    records = data if form.listed and isinstance(data, list) else [data]
    calls = [_call(record, first + offset) for offset, record in enumerate(records)]
    return None if None in calls or not calls else tuple(call for call in calls if call is not None)


def _call(record: Any, index: int) -> ToolCall | None:
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        return None
    arguments = record.get("arguments", record.get("parameters", {}))
    if isinstance(arguments, str):
        text = arguments
    elif isinstance(arguments, dict):
        text = json.dumps(arguments, ensure_ascii=False)
    else:
        return None
    return ToolCall(index, f"call_{secrets.token_hex(12)}", record["name"], text)
