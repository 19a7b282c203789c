"""A narrowed schema with what its words leave open spelled out, so that every library follows it alike."""

from __future__ import annotations

from typing import Any

from nearfar.edge_runtime.grammars.typed import Schema

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats of strings that are followed; others are annotations."""
_EACH = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf")
_ONE = ("items", "additionalProperties", "propertyNames")


def spelled_out(schema: Schema) -> Schema:
    """Objects that describe properties have no others, tuples no further items, and rules for names of
    properties are rules for properties of such names.
    """
    made = dict(schema)
    for key in made.keys() & set(_EACH):
        made[key] = {name: spelled_out(one) for name, one in made[key].items()}
    for key in made.keys() & set(_LISTS):
        made[key] = [spelled_out(one) for one in made[key]]
    for key in made.keys() & set(_ONE):
        made[key] = spelled_out(made[key]) if isinstance(made[key], dict) else made[key]
    if made.get("format") not in FORMATS:
        made.pop("format", None)
    if "propertyNames" in made:
        _as_patterns(made)
    if made.keys() & {"properties", "patternProperties"}:
        made.setdefault("additionalProperties", False)
    if "prefixItems" in made:
        made.setdefault("items", False)
    return made


def _as_patterns(made: dict[str, Any]) -> None:
    """Of the rules for names only a pattern says something of each name by itself."""
    names = made["propertyNames"]
    if isinstance(names, dict) and names.keys() <= {"type", "pattern"} and "pattern" in names:
        del made["propertyNames"]
        others = made.pop("additionalProperties", True)
        made["patternProperties"] = {names["pattern"]: {} if others is True else others}
