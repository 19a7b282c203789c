"""Error messages about a field's type in terms of JSON: pydantic's messages speak of Python's types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MUST_BE = "this must be "
IDLE = "idle"
"""Our own error type: for a field that is accepted only with values that have no effect."""
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
    "union_tag_invalid": "this must be {expected_tags}",
    "greater_than": "this must be more than {gt}",
    "greater_than_equal": "this must be at least {ge}",
    "less_than": "this must be less than {lt}",
    "less_than_equal": "this must be at most {le}",
    "string_pattern_mismatch": "this must match {pattern}",
    "string_too_short": "this must not be empty",
    "string_too_long": "this must have at most {max_length:,} characters",
    "too_short": "this must not be empty",
    "too_long": "this must have at most {max_length:,} entries",
}
"""Messages by pydantic's error type. The error's context gives the values; lower bounds of lengths are 1
everywhere.
"""


def words_of(error: Mapping[str, Any]) -> str:
    """Translate one of pydantic's errors for the author of the JSON."""
    known = _WORDS.get(error["type"])
    if known is not None:
        context = error.get("ctx", {})
        return known.format_map({name: _plain(value) for name, value in context.items()})
    return str(error["msg"]).removeprefix("Value error, ")


def words_of_all(errors: Sequence[Mapping[str, Any]]) -> str:
    """Combine a union's errors about one value: the message lists all types that the value may have."""
    words = list(dict.fromkeys(words_of(error) for error in errors))
    if len(words) == 1 or not all(each.startswith(_MUST_BE) for each in words):
        return words_of(errors[0])
    *others, last = (each.removeprefix(_MUST_BE) for each in words)
    return f"{_MUST_BE}{', '.join(others)} or {last}"


def _plain(value: Any) -> Any:
    """Write a bound as the documentation does: 1, not 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
