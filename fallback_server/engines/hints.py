"""Hints of a request on how much a model shall think and write. Many APIs have such fields; only a chat
template can follow them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

THINKING = ("enable_thinking", "thinking")
"""Variables by which chat templates turn thinking on or off: Qwen's, and DeepSeek's and Granite's."""
IDLE = "medium"
"""The neutral value of an effort or a verbosity."""


@dataclass(frozen=True)
class Hint:
    """One hint: `name` is the client's field, `kind` what it sets, and `value` its value.

    The value of "thinking" is a bool; the others are words such as "low" and "high".
    """

    name: str
    kind: Literal["reasoning_effort", "verbosity", "thinking"]
    value: str | bool


def followed(hints: Sequence[Hint], template: str, thinks: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the variables for a chat template, and the names of hints that have no effect.

    `thinks`: whether the model's answers have a reasoning section. An effort of "none" turns thinking off
    where the template has a variable for that.
    """
    variables: dict[str, Any] = {}
    left: list[str] = []
    for hint in hints:
        found = _variables(hint, template)
        idle = hint.value == IDLE or (not thinks and hint.value in ("none", False))
        if not found and not idle:
            left.append(hint.name)
        variables |= found
    return variables, tuple(left)


def _variables(hint: Hint, template: str) -> dict[str, Any]:
    """The chat template's variables for a hint; empty where the template has none."""
    if hint.kind != "thinking":
        found: dict[str, Any] = {hint.kind: hint.value} if _names(template, hint.kind) else {}
        if hint.kind == "verbosity" or hint.value != "none":
            return found
        return found | _variables(Hint(hint.name, "thinking", False), template)
    return next(({name: hint.value} for name in THINKING if _names(template, name)), {})


def _names(template: str, variable: str) -> bool:
    """Whether a template uses a variable of this name; members and string literals do not count."""
    return re.search(rf"(?<![.\w'\"]){variable}\b(?!['\"])", template) is not None
