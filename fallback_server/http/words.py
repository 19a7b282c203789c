"""Error messages about a field in terms of JSON: pydantic's messages and Python's `repr` speak of Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_MUST_BE = "this must be "
IDLE = "idle"
"""Our own error type: for a field that is accepted only with values that have no effect."""
KIND = "type"
"""Our own error type: for a value of a type that no member of a union has."""
ENTRY = "entry"
"""In the context of an error of the type KIND: the words for a list whose first element has a wrong type."""
_OBJECT = "this must be an object"
_WORDS = {
    "missing": "this field is missing",
    "union_tag_not_found": "this field is missing",
    "bool_type": "this must be true or false",
    "string_type": "this must be a string",
    "int_type": "this must be a whole number",
    "int_from_float": "this must be a whole number",
    "int_parsing_size": "this number is too large",
    "float_type": "this must be a number",
    "finite_number": "this must be a finite number",
    "list_type": "this must be a list",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "literal_error": "this must be {expected}",
    "greater_than": "this must be more than {gt}",
    "greater_than_equal": "this must be at least {ge}",
    "less_than": "this must be less than {lt}",
    "less_than_equal": "this must be at most {le}",
    "string_pattern_mismatch": "this must match {pattern}",
    "string_too_long": "this must have at most {max_length:,} characters",
    "too_long": "this must have at most {max_length:,} entries",
}
"""Messages by pydantic's error type. The error's context gives the values."""
_UNITS = {"string_too_short": "characters", "too_short": "entries"}
"""What a lower bound of a length counts, by error type."""
TYPES = {name for name in _WORDS if name.endswith("_type")} | {"literal_error", KIND}
"""Error types for a value of another type: another member of the same union may accept the value."""
SHOWN = 80
"""The most characters of a value that an error shows."""


def words_of(error: Mapping[str, Any]) -> str:
    """Translate one of pydantic's errors for the author of the JSON."""
    kind, context = error["type"], error.get("ctx", {})
    if (unit := _UNITS.get(kind)) is not None:
        least = context["min_length"]
        return "this must not be empty" if least == 1 else f"this must have at least {least:,} {unit}"
    if kind == "union_tag_invalid":
        return f"{_MUST_BE}{' or '.join(context['expected_tags'].rsplit(', ', 1))}"
    if (known := _WORDS.get(kind)) is not None:
        return known.format_map({name: _plain(value) for name, value in context.items()})
    return str(error["msg"]).removeprefix("Value error, ")


def words_of_all(errors: Sequence[Mapping[str, Any]]) -> str:
    """Combine a union's errors about one value: the message lists all types that the value may have."""
    words = list(dict.fromkeys(words_of(error) for error in errors))
    if len(words) == 1 or not all(each.startswith(_MUST_BE) for each in words):
        return words_of(errors[0])
    *others, last = (each.removeprefix(_MUST_BE) for each in words)
    return f"{_MUST_BE}{', '.join(others)} or {last}"


def shown(value: object) -> str:
    """Return a value for an error: JSON's name for the type of a list or an object, any other value itself.

    A string is in single quotes, as the rest of a message has them; what cannot be printed is escaped.
    """
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return f"'{printable(value[:SHOWN])}'"
    return json.dumps(value, default=str)[:SHOWN]


def printable(text: str) -> str:
    """Return the text with JSON's escapes in place of what cannot be printed."""
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def _plain(value: Any) -> Any:
    """Write a bound as the documentation does: 1, not 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
