"""Which part of a JSON schema a grammar library does not take, told by its place and keywords.

What `narrowed` lets through should compile; where a library still refuses it, its own words (a place in its
source, a regular expression that it made) say nothing to who wrote the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nearfar.edge_runtime.grammars.typed import Schema

MOST = 64
"""Compilations that a search may cost."""


def blamed(schema: Schema, compiles: Callable[[Schema], bool]) -> str:
    """What to say of a narrowed schema that does not compile: its smallest part that does not either."""
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    left, place, part = MOST, "#", schema
    while True:
        for name, child in _children(part):
            left -= 1
            if left < 0 or compiles({**child, **definitions}):
                continue
            place, part = f"{place}/{name}", child
            break
        else:
            break
    keywords = " and ".join(repr(key) for key in part if key not in ("type", "$defs")) or "'type'"
    return (
        f"the JSON schema cannot be enforced at {place}: {keywords} cannot be followed there; leave "
        "something out, and check the answer yourself"
    )


def _children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for key in ("properties", "patternProperties"):
        yield from ((f"{key}/{name}", one) for name, one in schema.get(key, {}).items())
    for key in ("prefixItems", "anyOf"):
        yield from ((f"{key}/{index}", one) for index, one in enumerate(schema.get(key, ())))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]


def schema_tags(tag: Any) -> Iterator[dict[str, Any]]:
    """The tags of JSON schemas in a structural tag."""
    if isinstance(tag, list):
        for one in tag:
            yield from schema_tags(one)
    elif isinstance(tag, dict) and tag.get("type") == "json_schema":
        yield tag
    elif isinstance(tag, dict):
        for one in tag.values():
            yield from schema_tags(one)
