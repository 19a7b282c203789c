"""A narrowed schema with what its words leave open spelled out, so that every library follows it alike."""

from __future__ import annotations

from nearfar.edge_runtime.grammars.typed import Schema

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats of strings that are followed; others are annotations."""
_EACH = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf")
_ONE = ("items", "additionalProperties")


def spelled_out(schema: Schema) -> Schema:
    """Objects that describe properties have no others, and tuples no further items."""
    made = dict(schema)
    for key in made.keys() & set(_EACH):
        made[key] = {name: spelled_out(one) for name, one in made[key].items()}
    for key in made.keys() & set(_LISTS):
        made[key] = [spelled_out(one) for one in made[key]]
    for key in made.keys() & set(_ONE):
        made[key] = spelled_out(made[key]) if isinstance(made[key], dict) else made[key]
    if made.get("format") not in FORMATS:
        made.pop("format", None)
    if made.keys() & {"minProperties", "maxProperties"}:
        _counted(made)
    if made.keys() & {"properties", "patternProperties"}:
        made.setdefault("additionalProperties", False)
    if "prefixItems" in made:
        made.setdefault("items", False)
    return made


def _counted(made: Schema) -> None:
    """Llguidance counts properties where those that are described are all required, or no others may come."""
    described, required = made.get("properties", {}), set(made.get("required", ()))
    if made.get("minProperties", 0) <= len(required):
        made.pop("minProperties", None)
    if described.keys() - required and made.keys() & {"minProperties", "maxProperties"}:
        made["additionalProperties"] = False
        if made.get("maxProperties", 0) >= len(described):
            del made["maxProperties"]
