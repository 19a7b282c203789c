"""Finds the part of a JSON schema that a grammar library rejects, and names its place and keywords.

A schema that `narrowed` returns should compile. If a library still rejects it, the library's message (a place
in its source, a regular expression that it made) does not help the author of the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nearfar.edge_runtime.grammars.typed import Schema

MOST = 64
"""The most compilations in one search."""
DEFINED = "#/$defs/"
NOTHING: Schema = {"type": "null"}
"""A schema that every library accepts."""


def blamed(schema: Schema, compiles: Callable[[Schema], bool]) -> str:
    """The error for a narrowed schema that does not compile: it names the place and keywords of its smallest
    such part.
    """
    definitions: dict[str, Schema] = dict(schema.get("$defs", {}))
    left, place, part = MOST, "#", schema
    while True:
        for at, child in _children(part, place, definitions):
            left -= 1
            if left < 0 or compiles({**child, "$defs": definitions}):
                continue
            place, part = at, child
            break
        else:
            break
        # A part that refers back to the definition being searched fails only because of that definition.
        definitions |= {name: NOTHING for name in definitions if place == f"{DEFINED}{name}"}
    keywords = " and ".join(repr(key) for key in part if key not in ("type", "$defs")) or "'type'"
    return (
        f"the JSON schema cannot be enforced at {place}: {keywords} cannot be followed there; leave "
        "something out, and check the answer yourself"
    )


def _children(schema: Schema, place: str, definitions: dict[str, Schema]) -> Iterator[tuple[str, Schema]]:
    """The parts of a schema with their places, and the definition that it refers to."""
    name = str(schema.get("$ref")).removeprefix(DEFINED)
    if name in definitions:
        yield f"{DEFINED}{name}", definitions[name]
    for key in ("properties", "patternProperties"):
        yield from ((f"{place}/{key}/{name}", one) for name, one in schema.get(key, {}).items())
    for key in ("prefixItems", "anyOf"):
        yield from ((f"{place}/{key}/{index}", one) for index, one in enumerate(schema.get(key, ())))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield f"{place}/{key}", schema[key]


def schema_tags(tag: Any) -> Iterator[dict[str, Any]]:
    """The tags of JSON schemas in a structural tag, at any depth."""
    if isinstance(tag, list):
        for one in tag:
            yield from schema_tags(one)
    elif isinstance(tag, dict) and tag.get("type") == "json_schema":
        yield tag
    elif isinstance(tag, dict):
        for one in tag.values():
            yield from schema_tags(one)
