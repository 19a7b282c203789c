"""What a model marks in its text: reasoning and tool calls. Text comes piece by piece and is taken apart
on the way.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from nearfar.fallback_server.engines.base import ToolCall
from nearfar.fallback_server.marks import FORMATS, HERMES, LLAMA, CallFormat, Marks


def call_format(template: str) -> tuple[CallFormat, bool]:
    """The format that a chat template shows its model, and whether the template writes out `tools` itself."""
    knows = "tools" in template
    found = next((form for form in FORMATS if form.begin in template), None)
    if found is None:
        found = LLAMA if knows and '"parameters"' in template else HERMES
    return found, knows


@dataclass(frozen=True)
class Fragment:
    """A piece of text by kind; the text of a `call` is what stands between the marks, of a `cut` one after
    the first.
    """

    kind: Literal["text", "reasoning", "call", "cut"]
    text: str


class MarkupSplitter:
    """Takes a text apart while it comes. What may be the beginning of a mark is held back until that is
    certain.
    """

    def __init__(
        self, reasoning: Marks | None, calls: CallFormat | None, *, reasoning_open: bool = False
    ) -> None:
        self._reasoning, self._calls = reasoning, calls
        self._kind: Literal["text", "reasoning", "call"] = (
            "reasoning" if reasoning and reasoning_open else "text"
        )
        self._held = ""
        self._strip = False

    def push(self, text: str) -> list[Fragment]:
        """What this text makes certain."""
        self._held += text
        return list(self._split())

    def finish(self) -> list[Fragment]:
        """What was held back, for the text ends here. An open call is whole only where its format has no
        end mark.
        """
        held, self._held = self._held, ""
        if self._kind != "call":
            return [Fragment(self._kind, held)] if held else []
        assert self._calls is not None
        return [Fragment("call" if not self._calls.end else "cut", held)]

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
                    out, self._held = (
                        self._held[: len(self._held) - keep],
                        self._held[len(self._held) - keep :],
                    )
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
        return ([self._reasoning.begin] if self._reasoning else []) + (
            [self._calls.begin] if self._calls else []
        )

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
    """The calls that stand in a call section, numbered from `first`; None if it is not what the format
    says.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    records = data if form.listed and isinstance(data, list) else [data]
    calls = [_call(record, first + offset) for offset, record in enumerate(records)]
    return None if None in calls or not calls else tuple(call for call in calls if call is not None)


_BEGUN = re.compile(
    r'[\s\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*))?',
    re.DOTALL,
)


def partial_call(text: str, index: int) -> ToolCall | None:
    """The call that a section begins which was cut: its name and the JSON text of its arguments so far.
    None: no name yet.
    """
    found = _BEGUN.match(text)
    if found is None:
        return None
    arguments = found[2] or ""
    with suppress(ValueError, RecursionError):  # they may be whole, and only the end of the section missing
        arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
    return ToolCall(index, f"call_{secrets.token_hex(12)}", json.loads(found[1]), arguments)


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
