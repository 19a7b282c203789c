"""Writes calls as a model would have written them, for templates that do not render calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nearfar.format.answers import CallFormat, Spelling


def written_call(form: CallFormat, name: str, arguments: Any, *, blank: bool = True) -> str:
    """A section with one call. `blank`: with the blank lines that models put into it."""
    between = form.blank if blank else ""
    if form.named is not None:
        inner = form.named.before + name + form.named.after + _arguments(form.spelling, arguments)
    else:
        inner = _json({form.name: name, form.arguments: arguments})
    begin, end = ("", "") if form.bare else (form.begin + between, between + form.end)
    return begin + (f"[{inner}]" if form.listed else inner) + end


def _arguments(spelling: Spelling | None, arguments: Any) -> str:
    if spelling is None or not isinstance(arguments, Mapping):
        return _json(arguments)
    each = [
        spelling.before_name + name + spelling.after_name + _top(spelling, value) + spelling.after_value
        for name, value in arguments.items()
    ]
    return spelling.begin + spelling.separator.join(each) + spelling.end


def _top(spelling: Spelling, value: Any) -> str:
    return value if spelling.raw and isinstance(value, str) else _value(spelling, value)


def _value(spelling: Spelling, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return spelling.words[2 if value is None else 0 if value else 1]
    if not spelling.quotes:
        return _json(value)
    if isinstance(value, str):
        return spelling.quotes[0] + value + spelling.quotes[1]
    if isinstance(value, list):
        return "[" + ",".join(_value(spelling, one) for one in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_value(spelling, one)}" for name, one in value.items()) + "}"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
