"""How models mark reasoning and tool calls in their text: facts that the text side and the grammars share."""

from __future__ import annotations

from dataclasses import dataclass


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
