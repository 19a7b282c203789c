"""The schema of a tool's arguments, which are an object.

A schema that no object matches is refused. If other values match it, too, the grammar uses only its part for
objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nearfar.errors import RequestError
from nearfar.format.keywords import ANNOTATIONS, DEFINITIONS, MOST_REFERENCES
from nearfar.format.requests import MAX_SCHEMAS_BYTES
from nearfar.json_size import json_bytes

Schema = Mapping[str, Any]
_ANY_OBJECT: Schema = {"type": "object"}
_BESIDE = {"$ref", *DEFINITIONS, "title", "description", "default", "examples", "$comment", "$schema", "$id"}
"""Keys next to a reference that demand nothing; with others, the referenced schema is not the whole one."""

_NAMED = {"properties", "patternProperties", "dependentSchemas", *DEFINITIONS}
"""Keywords whose value has names of the schema's author, each with a schema."""
_VALUES = ("const", "enum")
"""Keywords whose value is not a schema."""


def check_schemas(tools: Iterable[Mapping[str, Any]]) -> None:
    """Raise RequestError for tools whose schemas have more than MAX_SCHEMAS_BYTES together."""
    size = sum(json_bytes(_bare(tool["function"].get("parameters"))) for tool in tools)
    if size > MAX_SCHEMAS_BYTES:
        raise RequestError(
            f"tools: their schemas have {size:,} bytes without descriptions, and a grammar takes at most "
            f'{MAX_SCHEMAS_BYTES:,}; offer fewer tools or simpler ones, or send tool_choice "none"',
            "tools",
        )


def _bare(schema: Any) -> Any:
    """A schema without annotations."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key not in ANNOTATIONS and key[:2] != "x-"}
    return {key: value if key in _VALUES else _bare_part(key, value) for key, value in kept.items()}


def _bare_part(key: str, value: Any) -> Any:
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _bare(one) for name, one in value.items()}
    return _bare(value)


def fits_objects(schema: Schema) -> bool:
    """Whether an object may match a schema."""
    return _Parameters(schema).fit(schema)


def check_parameters(where: str, schema: Schema) -> None:
    """Raise RequestError for a schema that no object matches. `where`: its place in the request."""
    if not fits_objects(schema):
        raise RequestError(
            f"{where} must be a schema of type object, for arguments are an object, not {dict(schema)!r:.80}",
            "tools",
        )


def argument_schema(function: Mapping[str, Any]) -> Schema:
    """The schema of a function's arguments: the part of its parameters that is for objects."""
    schema = function.get("parameters") or _ANY_OBJECT
    made: Schema = _Parameters(schema).objects(schema)
    return made


class _Parameters:
    """One schema with the references into it; at most MOST_REFERENCES of them are followed."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._fit: dict[str, bool] = {}
        self._followed = 0

    def fit(self, schema: Any) -> bool:
        """Whether an object may match a schema. Invalid schemas are reported when the grammar is made."""
        if not isinstance(schema, Mapping):
            return schema is not False
        kinds = schema.get("type", "object")
        if not (kinds == "object" or (isinstance(kinds, list) and "object" in kinds)):
            return False
        values = _values(schema)
        if isinstance(values, list) and not any(isinstance(one, Mapping) for one in values):
            return False
        if (target := self._target(schema)) is not None:
            pointer = schema["$ref"]
            if pointer not in self._fit and len(self._fit) >= MOST_REFERENCES:
                return True  # the grammar's code rejects a longer chain of references
            if pointer not in self._fit:
                self._fit[pointer] = True  # the value for a reference that leads back to itself
                self._fit[pointer] = self.fit(target)
            if not self._fit[pointer]:
                return False
        for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            options = schema.get(key)
            if isinstance(options, list) and options and not enough(map(self.fit, options)):
                return False
        return True

    def objects(self, schema: Any) -> Any:
        """The schema without its parts for other values.

        References at the top are followed: models that do not write JSON are given the properties by name.
        """
        if schema is True:
            return _ANY_OBJECT
        if not isinstance(schema, Mapping):
            return schema
        target = self._target(schema)
        if target is not None and self._followed < MOST_REFERENCES and not schema.keys() - _BESIDE:
            self._followed += 1
            defined = {key: schema[key] for key in DEFINITIONS if key in schema}
            return {**self.objects(target), **defined}
        if target is not None:
            return {**schema, "type": "object"}
        values = _values(schema)
        if isinstance(values, list):
            others = {key: value for key, value in schema.items() if key != "const"}
            return {**others, "enum": [one for one in values if isinstance(one, Mapping)]}
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            if isinstance(options, list):
                return {**schema, key: [self.objects(one) for one in options if self.fit(one)]}
        options = schema.get("allOf")
        if isinstance(options, list) and len(options) == 1:
            return {**schema, "allOf": [self.objects(options[0])]}
        return {**schema, "type": "object"}

    def _target(self, schema: Schema) -> Schema | None:
        """The target of a schema's reference into the whole schema; None if there is none."""
        pointer = schema.get("$ref")
        if not isinstance(pointer, str) or not pointer.startswith("#/"):
            return None
        at: Any = self._root
        for part in pointer.split("/")[1:]:
            at = at.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
        return at if isinstance(at, Mapping) else None


def _values(schema: Schema) -> Any:
    return [schema["const"]] if "const" in schema else schema.get("enum")
