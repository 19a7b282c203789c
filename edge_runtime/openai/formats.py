"""`response_format`: the form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nearfar.edge_runtime.grammars import Grammar
from nearfar.errors import RequestError
from nearfar.format.requests import MAX_GRAMMAR_BYTES
from nearfar.json_size import json_bytes
from nearfar.suggestions import advised

PARAM = "response_format"
_FIELDS = {
    "text": frozenset[str](),
    "json_object": frozenset[str](),
    "json_schema": frozenset({"json_schema"}),
    "regex": frozenset({"regex"}),
    "grammar": frozenset({"grammar"}),
}
"""Fields in addition to `type`. `regex` and `grammar` (EBNF with a rule `root`) are nearfar's own."""
_DESCRIPTION = frozenset({"name", "description", "schema", "strict"})


def grammar_of(given: object) -> Grammar | None:
    """The grammar of a response_format; None if any text is allowed. RequestError for an invalid one."""
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") not in tuple(_FIELDS):
        raise _error(f"must be an object whose type is one of {', '.join(_FIELDS)}, not {given!r:.80}")
    kind: str = given["type"]
    if unknown := sorted(str(name) for name in given.keys() - _FIELDS[kind] - {"type"}):
        raise _error(f"of type {kind!r} has no field {', '.join(unknown)}{advised(unknown, _FIELDS[kind])}")
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar("json_object", "")
        case "json_schema":
            return Grammar("json_schema", _schema(given.get("json_schema")))
        case "regex":
            return Grammar("regex", _text(kind, given.get("regex")))
        case _:
            return Grammar("ebnf", _text(kind, given.get("grammar")))


def _schema(given: object) -> str:
    if not isinstance(given, Mapping):
        raise _error(f"of type 'json_schema' needs json_schema: {{'name', 'schema'}}, not {given!r:.80}")
    if not isinstance(given.get("name"), str) or not given["name"]:
        raise _error(f"json_schema.name must be a name, not {given.get('name')!r:.80}")
    if unknown := sorted(str(name) for name in given.keys() - _DESCRIPTION):
        raise _error(f"json_schema has no field {', '.join(unknown)}{advised(unknown, _DESCRIPTION)}")
    for name, kind in (("description", str), ("strict", bool)):
        if not isinstance(given.get(name), kind | None):
            raise _error(f"json_schema.{name} must be a {kind.__name__}, not {given[name]!r:.80}")
    schema: Any = given.get("schema")
    if schema is None:
        schema = {"type": "object"}
    if not isinstance(schema, Mapping):
        raise _error(f"json_schema.schema must be an object, not {schema!r:.80}")
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(f"json_schema.schema is not JSON: {error}") from error
    _small(json_bytes(schema))
    return text


def _text(kind: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        raise _error(f"of type {kind!r} needs the field {kind!r}, a string that is not empty")
    _small(len(given.encode(errors="replace")))
    return given


def _small(size: int) -> None:
    if size > MAX_GRAMMAR_BYTES:
        raise _error(f"takes at most {MAX_GRAMMAR_BYTES:,} bytes, not {size:,}")


def _error(what: str) -> RequestError:
    return RequestError(f"{PARAM} {what}", PARAM)
