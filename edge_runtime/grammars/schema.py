"""JSON schemas as grammars enforce them: keywords that a grammar library would ignore are refused by name and
place.

Measured against the JSON Schema test suite (tests/unit/test_json_schemas.py): with a schema that `narrowed`
returns, neither library produces a value that the original schema forbids. A schema may be enforced more
narrowly than it says: properties come in the order of the schema, and without others unless
`additionalProperties` allows them; a pattern may have to match the whole string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from nearfar.edge_runtime.grammars.typed import Schema, TypedKeywords
from nearfar.errors import RequestError
from nearfar.format.keywords import (
    ANNOTATIONS,
    DEFINITIONS,
    MOST_COMPARED,
    MOST_REFERENCES,
    OF_TYPE,
    STRUCTURE,
    TYPES,
)

LARGEST = 2**63
_PLAIN = re.compile(r"\w{1,64}", re.ASCII)


def narrowed(schema: Any, *, strict: bool, param: str) -> Schema:
    """Narrow a schema to what a grammar can enforce.

    RequestError (with `param`) names a keyword that cannot be enforced, and its place. If not `strict`, such
    keywords are left out, and the text need not follow them.
    """
    return _Narrowing(schema, strict, param).made()


class _Narrowing(TypedKeywords):
    """Narrows one schema."""

    def __init__(self, schema: Any, strict: bool, param: str) -> None:
        self._root, self._strict, self._param = schema, strict, param
        self._places: dict[str, Schema] = {}
        self._refs: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._compared = 0

    def made(self) -> Schema:
        """The narrowed schema, with the targets of references among the definitions of the root.

        Not every library follows a reference into a list, or with escapes.
        """
        made = self._schema(self._root, "#")
        for target, place in self._refs.items():
            if target not in self._places:
                raise self._error(place, f"$ref {target!r:.80} leads to nothing that is a schema")
        definitions = {name: self._places[target] for target, name in self._names.items()}
        return {**made, "$defs": definitions} if definitions else made

    def _error(self, place: str, what: str) -> RequestError:
        return RequestError(
            f"{self._param}: the JSON schema cannot be enforced at {place}: {what}", self._param
        )

    def _drop(self, place: str, keyword: str, why: str = "no grammar can enforce it") -> None:
        """Refuse a keyword if the schema is strict; otherwise it is left out."""
        if self._strict:
            raise self._error(place, f"{keyword!r}: {why}. Leave it out, and check the answer yourself")

    def _schema(self, schema: Any, place: str) -> Schema:
        made = self._places[place] = self._narrowed(schema, place)
        return made

    def _narrowed(self, schema: Any, place: str) -> Schema:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise self._error(place, f"{schema!s:.40} allows nothing, or is not a schema")
        known = {
            key: value for key, value in schema.items() if key not in ANNOTATIONS and not key.startswith("x-")
        }
        if place == "#":
            known.pop("$id", None)
        for key in DEFINITIONS:
            if key in known:
                self._each(known.pop(key), f"{place}/{key}")
        for key in [
            key for key in known if key not in STRUCTURE and not any(key in keys for keys in OF_TYPE.values())
        ]:
            self._drop(place, key)
            del known[key]
        for key in ("$ref", "const", "enum", "allOf", "anyOf", "oneOf"):
            if key in known:
                value = known.pop(key)
                found: Schema | None = getattr(self, f"_{key.strip('$').lower()}")(value, known, place)
                if found is not None:
                    self._alone(known, key, place)
                    return found
        return self._typed(known, place)

    def _alone(self, rest: Schema, keyword: str, place: str) -> None:
        for other in rest:
            self._drop(place, other, f"it cannot be enforced together with {keyword!r}")

    def _each(self, schemas: Any, place: str) -> Schema:
        if not isinstance(schemas, dict):
            raise self._error(place, "this must be an object of schemas")
        return {name: self._schema(one, f"{place}/{_escaped(name)}") for name, one in schemas.items()}

    def _list(self, schemas: Any, place: str) -> list[Schema]:
        if not isinstance(schemas, list) or not schemas:
            raise self._error(place, "this must be a list of schemas that is not empty")
        return [self._schema(one, f"{place}/{index}") for index, one in enumerate(schemas)]

    def _ref(self, target: Any, rest: Schema, place: str) -> Schema | None:
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            self._drop(place, "$ref", "only references into the schema itself (#/…) are followed")
            return None
        target = unquote(target)
        seen = {place}
        at: Any = target
        while isinstance(at, str):  # a chain of references that leads back to itself allows any value
            if at in seen:
                raise self._error(place, f"$ref {target!r:.80} leads back to itself")
            seen.add(at)
            if len(seen) > MOST_REFERENCES:
                raise self._error(
                    place, f"$ref {target!r:.80} leads through more than {MOST_REFERENCES} others"
                )
            found = self._at(at)
            at = found.get("$ref") if isinstance(found, dict) else None
            at = unquote(at) if isinstance(at, str) else None
        self._refs.setdefault(target, place)
        return {"$ref": "#" if target == "#" else f"#/$defs/{self._name(target)}"}

    def _name(self, target: str) -> str:
        """The name of a referenced schema among the definitions: its own name if that is plain."""
        if target not in self._names:
            own = target.removeprefix("#/$defs/")
            plain = _PLAIN.fullmatch(own) and own not in self._names.values()
            self._names[target] = own if plain else f"ref.{len(self._names)}"
        return self._names[target]

    def _at(self, pointer: str) -> Any:
        """The value at a JSON pointer; None if there is none."""
        at = self._root
        for part in pointer.split("/")[1:]:
            if isinstance(at, list) and part.isdecimal() and len(part) < 6:
                at = at[int(part)] if int(part) < len(at) else None
            else:
                at = at.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
        return at

    def _const(self, value: Any, rest: Schema, place: str) -> Schema:
        return self._enum([value], rest, place)

    def _enum(self, values: Any, rest: Schema, place: str) -> Schema:
        if not isinstance(values, list):
            raise self._error(place, "enum must be a list")
        types = self._types(rest.pop("type", list(TYPES)), place)
        if "enum" in rest:  # enum stands beside const
            also = rest.pop("enum")
            values = [
                value for value in values if isinstance(also, list) and any(_same(value, one) for one in also)
            ]
        kept = [value for value in values if any(_is(value, kind) for kind in types)]
        if not kept:
            raise self._error(place, "of enum (or const) nothing is left that the rest of the schema allows")
        if any(_too_large(value) for value in kept):
            raise self._error(place, f"enum (or const) has a whole number of {LARGEST} or more")
        return {"enum": kept}

    def _allof(self, schemas: Any, rest: Schema, place: str) -> Schema | None:
        if isinstance(schemas, list) and len(schemas) == 1:
            return self._schema(schemas[0], f"{place}/allOf/0")
        self._drop(place, "allOf", "only one schema can stand in it; write the schemas as one")
        return None

    def _anyof(self, schemas: Any, rest: Schema, place: str) -> Schema:
        return {"anyOf": self._list(schemas, f"{place}/anyOf")}

    def _oneof(self, schemas: Any, rest: Schema, place: str) -> Schema:
        made = self._list(schemas, f"{place}/oneOf")
        for (i, first), (j, second) in combinations(enumerate(schemas), 2):
            if not self._apart(first, second):
                self._drop(place, "oneOf", f"its schemas {i} and {j} may both fit one value; use anyOf")
        return {"anyOf": made}

    def _apart(self, first: Any, second: Any) -> bool:
        """Whether certainly no value matches both schemas: by their types, values, or a required property's
        schema.
        """
        self._compared += 1
        if self._compared > MOST_COMPARED:
            raise self._error("#", "its oneOf take too long to tell apart; use anyOf")
        first, second = self._resolved(first), self._resolved(second)
        if not isinstance(first, dict) or not isinstance(second, dict):
            return False
        values = _values(first), _values(second)
        if values[0] is not None and values[1] is not None:
            return not any(_same(a, b) for a in values[0] for b in values[1])
        types = _declared(first), _declared(second)
        if types[0] and types[1] and not any(_overlap(a, b) for a in types[0] for b in types[1]):
            return True
        if types != ({"object"}, {"object"}):
            return False
        shared = set(_names(first.get("required"))) & set(_names(second.get("required")))
        return any(self._apart(_property(first, name), _property(second, name)) for name in shared)

    def _resolved(self, schema: Any) -> Any:
        for _ in range(16):
            if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
                break
            schema = self._at(unquote(schema["$ref"]))
        return schema


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "integer":
            return _is(value, "number") and value == int(value)
        case _:
            classes = {"string": str, "object": dict, "array": list, "boolean": bool, "null": type(None)}
            return isinstance(value, classes[kind])


def _same(first: Any, second: Any) -> bool:
    """Equality of JSON values, where true is not 1."""
    if isinstance(first, bool) != isinstance(second, bool):
        return False
    if isinstance(first, list | dict):
        # values that may be equal count as equal, to be safe
        return repr(first) == repr(second) or bool(first == second)
    return bool(first == second)


def _too_large(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(_too_large(one) for one in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) >= LARGEST


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _declared(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows; an empty set if they are not known."""
    values = _values(schema)
    if values is not None:
        return {kind for kind in TYPES for value in values if kind != "integer" and _is(value, kind)}
    declared = schema.get("type")
    if declared is None:
        return {"object"} if "properties" in schema else set()
    return set(_names(declared if isinstance(declared, list) else [declared]))


def _overlap(first: str, second: str) -> bool:
    return first == second or {first, second} == {"integer", "number"}


def _names(value: Any) -> Iterator[str]:
    yield from (name for name in value if isinstance(name, str)) if isinstance(value, list) else ()


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None
