"""Reads from a server's OpenAPI description which paths it has, and which fields their requests take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.remote.chunks import ShapeError


@dataclass(frozen=True)
class ServerPath:
    """Where a server has a path, and the fields of its JSON requests."""

    path: str
    fields: frozenset[str]


def listed_paths(record: Mapping[str, Any], wanted: Collection[str]) -> dict[str, ServerPath]:
    """Return the wanted paths that a description lists for POST, with or without their version. Raises
    ShapeError for what is not a description.
    """
    paths = record.get("paths")
    if not isinstance(paths, dict):
        raise ShapeError("the description has no paths")
    found = dict[str, ServerPath]()
    for path in wanted:
        for name in (path, path.removeprefix("/v1").removeprefix("/v2")):
            if isinstance(post := _at(paths, name, "post"), dict):
                found[path] = ServerPath(name, frozenset(_fields(record, post)))
                break
    return found


def _fields(record: Mapping[str, Any], post: Mapping[str, Any]) -> list[str]:
    schema = _at(post, "requestBody", "content", "application/json", "schema")
    for _ in range(4):  # a description may refer to itself
        reference = _at(schema, "$ref")
        if not isinstance(reference, str):
            break
        schema = _at(record, *reference.removeprefix("#/").split("/"))
    union = next(
        (some for kind in ("anyOf", "oneOf", "allOf") if isinstance(some := _at(schema, kind), list)), []
    )
    names = [name for each in union[:16] for name in _fields(record, {"requestBody": {"content": {
        "application/json": {"schema": _resolved(record, each)}}}})]  # fmt: skip
    properties = _at(schema, "properties")
    return [*names, *(properties if isinstance(properties, dict) else ())]


def _resolved(record: Mapping[str, Any], schema: Any) -> Any:
    """Return a member of a union without further unions, so that reading it ends."""
    reference = _at(schema, "$ref")
    found = _at(record, *reference.removeprefix("#/").split("/")) if isinstance(reference, str) else schema
    return {"properties": _at(found, "properties")}


def _at(record: Any, *names: str) -> Any:
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record
