"""Makes implicit rules of a narrowed schema explicit, so that every library enforces it in the same way."""

from __future__ import annotations

from nearfar.edge_runtime.grammars.typed import Schema

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""String formats that are enforced; others are annotations."""
_EACH = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf")
_ONE = ("items", "additionalProperties")


def spelled_out(schema: Schema) -> Schema:
    """Allow no additional properties in objects with properties, and no further items in tuples, unless the
    schema says so.
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
    if made.keys() & {"minProperties", "maxProperties"}:
        _counted(made)
    if made.keys() & {"properties", "patternProperties"}:
        made.setdefault("additionalProperties", False)
    if "prefixItems" in made:
        made.setdefault("items", False)
    return made


def _counted(made: Schema) -> None:
    """Bring counts of properties into a form that llguidance enforces.

    It counts only if all described properties are required, or if no others are allowed: so others are
    forbidden here.
    """
    described, required = made.get("properties", {}), set(made.get("required", ()))
    if made.get("minProperties", 0) <= len(required):
        made.pop("minProperties", None)
    if described.keys() - required and made.keys() & {"minProperties", "maxProperties"}:
        made["additionalProperties"] = False
        if made.get("maxProperties", 0) >= len(described):
            del made["maxProperties"]
