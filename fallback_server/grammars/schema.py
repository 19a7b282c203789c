"""JSON schemas as xgrammar keeps to them: what it would pass over in silence is refused here, by its name and
place.

Measured against the JSON Schema test suite (tests/unit/test_json_schemas.py): what `narrowed` lets through,
xgrammar never follows to a value that the schema forbids. A schema may be followed more narrowly than it
says: properties come in the order of the schema and without others unless `additionalProperties` allows them,
a pattern covers the whole string.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from nearfar.errors import RequestError
from nearfar.fallback_server.grammars.patterns import why_not

Schema = dict[str, Any]

ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "$comment",
        "$schema",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "nullable",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
        "externalDocs",
        "xml",
    }
)
"""Keywords that forbid nothing, or (nullable) only allow more than is written."""
OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
}
"""Keywords that are kept to, by the type that they speak of. All others but ANNOTATIONS and STRUCTURE are
not.
"""
STRUCTURE = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"})
DEFINITIONS = ("$defs", "definitions")
TYPES = ("string", "number", "integer", "object", "array", "boolean", "null")
LARGEST = 2**63


def narrowed(schema: Any, *, strict: bool, param: str) -> Schema:
    """The schema as a grammar can keep to it.

    RequestError (with `param`) names a keyword that cannot be kept to and its place. Not `strict`: such
    keywords are left out, and the text need not follow them.
    """
    return _Narrowing(schema, strict, param).made()


class _Narrowing:
    """One schema on its way."""

    def __init__(self, schema: Any, strict: bool, param: str) -> None:
        self._root, self._strict, self._param = schema, strict, param
        self._visited: set[str] = set()
        self._refs: dict[str, str] = {}

    def made(self) -> Schema:
        made = self._schema(self._root, "#")
        for target, place in self._refs.items():
            if target not in self._visited:
                raise self._error(place, f"$ref {target!r:.80} leads to nothing that is a schema")
        return made

    def _error(self, place: str, what: str) -> RequestError:
        return RequestError(
            f"{self._param}: the JSON schema cannot be kept to at {place}: {what}", self._param
        )

    def _drop(self, place: str, keyword: str, why: str = "no grammar can keep to it") -> None:
        """The keyword is refused, or left out."""
        if self._strict:
            raise self._error(place, f"{keyword!r}: {why}. Leave it out, and check the answer yourself")

    def _schema(self, schema: Any, place: str) -> Schema:
        self._visited.add(place)
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise self._error(place, f"{schema!s:.40} allows nothing, or is no schema")
        known = {
            key: value for key, value in schema.items() if key not in ANNOTATIONS and not key.startswith("x-")
        }
        if place == "#":
            known.pop("$id", None)
        made: Schema = {}
        for key in DEFINITIONS:
            if key in known:
                made[key] = self._each(known.pop(key), f"{place}/{key}")
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
                    return {**found, **made}
        return {**self._typed(known, place), **made}

    def _alone(self, rest: Schema, keyword: str, place: str) -> None:
        for other in rest:
            self._drop(place, other, f"it cannot be kept to beside {keyword!r}")

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
        seen = {place}
        at: Any = target
        while isinstance(at, str):  # a reference that leads through references to itself says nothing
            if at in seen:
                raise self._error(place, f"$ref {target!r:.80} leads back to itself")
            seen.add(at)
            found = self._at(at)
            at = found.get("$ref") if isinstance(found, dict) else None
        self._refs.setdefault(target, place)
        return {"$ref": target}

    def _at(self, pointer: str) -> Any:
        """What a pointer leads to; None if nothing."""
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
        if "enum" in rest:  # beside const
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
        """Whether it is certain that nothing fits both: by their types, values, or a required property's."""
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
            schema = self._at(schema["$ref"])
        return schema

    def _types(self, value: Any, place: str) -> list[str]:
        types = value if isinstance(value, list) else [value]
        if not types or any(kind not in TYPES for kind in types):
            raise self._error(place, f"type {value!r:.60} must be one or several of {', '.join(TYPES)}")
        return [kind for kind in types if not (kind == "integer" and "number" in types)]

    def _typed(self, known: Schema, place: str) -> Schema:
        """A schema of one or several types, with their keywords. Without a type it has those that its
        keywords speak of.
        """
        spoken = [kind for kind, keys in OF_TYPE.items() if any(key in known for key in keys)]
        if "type" not in known and not spoken:
            return {}
        types = self._types(known["type"], place) if "type" in known else spoken
        made: Schema = {"type": types[0] if len(types) == 1 else types}
        for kind in types:
            own = {
                key: known[key]
                for key in OF_TYPE.get("number" if kind == "integer" else kind, ())
                if key in known
            }
            if own:
                made |= getattr(self, f"_{kind}")(own, place)
        return made

    def _string(self, own: Schema, place: str) -> Schema:
        pattern = own.get("pattern")
        own |= self._counts(own, ("minLength", "maxLength"), place)
        if len(own) > 1:
            own.pop("format", None)  # an annotation; xgrammar would follow nothing else beside it
        if pattern is not None:
            why = why_not(pattern)
            if why is None and len(own) > 1:
                why = "it cannot be kept to beside minLength or maxLength"
            if why is not None:
                self._drop(place, "pattern", why)
                del own["pattern"]
        if own.keys() & {"minLength", "maxLength"}:
            # As a pattern: by itself xgrammar lets control characters into strings of a bounded length.
            low, high = own.pop("minLength", 0), own.pop("maxLength", None)
            if high is not None and high < low:
                raise self._error(place, f"minLength {low} is greater than maxLength {high}")
            own["pattern"] = f"^.{{{low},{'' if high is None else high}}}$"
        return own

    def _number(self, own: Schema, place: str) -> Schema:
        for key, value in own.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise self._error(place, f"{key} must be a number, not {value!r:.40}")
        return own

    def _integer(self, own: Schema, place: str) -> Schema:
        """Bounds of whole numbers are whole numbers."""
        own = self._number(own, place)
        low = [math.ceil(own["minimum"])] if "minimum" in own else []
        low += [math.floor(own["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in own else []
        high = [math.floor(own["maximum"])] if "maximum" in own else []
        high += [math.ceil(own["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in own else []
        made = {"minimum": max(low)} if low else {}
        return {**made, "maximum": min(high)} if high else made

    def _array(self, own: Schema, place: str) -> Schema:
        own |= self._counts(own, ("minItems", "maxItems"), place)
        if own.pop("uniqueItems", False) and own.get("maxItems", 2) > 1:
            self._drop(place, "uniqueItems")
        self._unevaluated(own, "unevaluatedItems", "items", place)
        if own.get("minItems", 0) > len(own.get("prefixItems", ())):
            own.setdefault("items", {})
        if "prefixItems" in own:
            own["prefixItems"] = self._list(own["prefixItems"], f"{place}/prefixItems")
        if isinstance(own.get("items"), dict):
            own["items"] = self._schema(own["items"], f"{place}/items")
        return own

    def _object(self, own: Schema, place: str) -> Schema:
        own |= self._counts(own, ("minProperties", "maxProperties"), place)
        self._unevaluated(own, "unevaluatedProperties", "additionalProperties", place)
        if own.get("minProperties") and not own.keys() & {"properties", "patternProperties", "propertyNames"}:
            own.setdefault("additionalProperties", True)
        if isinstance(own.get("additionalProperties"), dict):
            own["additionalProperties"] = self._schema(
                own["additionalProperties"], f"{place}/additionalProperties"
            )
        if "properties" in own:
            own["properties"] = self._each(own["properties"], f"{place}/properties")
        if "propertyNames" in own:
            self._property_names(own, place)
        if "patternProperties" in own:
            self._pattern_properties(own, place)
        if "required" in own:
            self._required(own, place)
        if own.get("minProperties", 0) > 1 and own.get("additionalProperties", False) is not False:
            # The same name twice would count as two.
            self._drop(place, "minProperties", "beside additionalProperties it is only kept to up to 1")
            del own["minProperties"]
        return own

    def _unevaluated(self, own: Schema, keyword: str, others: str, place: str) -> None:
        """false: nothing but what is described, as all that is described stands in the same schema."""
        value = own.pop(keyword, True)
        if not isinstance(value, bool):
            self._drop(place, keyword, "only true and false are taken")
        elif not value and others not in own:
            own[others] = False

    def _required(self, own: Schema, place: str) -> None:
        """Required properties that are not described are described: xgrammar asks for no others."""
        names = own["required"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._error(place, "required must be a list of names")
        missing = [name for name in dict.fromkeys(names) if name not in own.get("properties", {})]
        if not missing:
            return
        others = own.get("additionalProperties", True)
        if others is False or "patternProperties" in own or "propertyNames" in own:
            self._drop(place, "required", f"the property {missing[0]!r:.60} is not among the properties")
            own["required"] = [name for name in names if name not in missing]
            return
        described = {name: {} if others is True else others for name in missing}
        own["properties"] = {**own.get("properties", {}), **described}

    def _property_names(self, own: Schema, place: str) -> None:
        names = own["propertyNames"]
        if "properties" in own or "patternProperties" in own:
            self._drop(place, "propertyNames", "it cannot be kept to beside properties or patternProperties")
            del own["propertyNames"]
        else:
            own["propertyNames"] = self._schema(names, f"{place}/propertyNames")

    def _pattern_properties(self, own: Schema, place: str) -> None:
        patterns = own["patternProperties"]
        if not isinstance(patterns, dict):
            raise self._error(place, "patternProperties must be an object of schemas")
        why = next((reason for pattern in patterns if (reason := why_not(pattern))), None)
        if why is None and len(patterns) > 1:
            why = "only one pattern can be kept to"
        if why is None and own.get("additionalProperties", False) is not False:
            why = "it cannot be kept to beside additionalProperties"
        if why is None and any(
            re.search(pattern, name) for pattern in patterns for name in own.get("properties", ())
        ):
            why = "a property that is described has a name of this pattern"
        if why is not None:
            self._drop(place, "patternProperties", why)
            del own["patternProperties"]
        else:
            own["patternProperties"] = self._each(patterns, f"{place}/patternProperties")

    def _counts(self, own: Schema, keys: tuple[str, ...], place: str) -> Schema:
        """Whole numbers, which JSON may write as 3.0."""
        for key in keys:
            value = own.get(key, 0)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value < 0
                or value != int(value)
            ):
                raise self._error(place, f"{key} must be a whole number, not {value!r:.40}")
        return {key: int(own[key]) for key in keys if key in own}


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
    """Equality of JSON, where true is not 1."""
    if isinstance(first, bool) != isinstance(second, bool):
        return False
    if isinstance(first, list | dict):
        return repr(first) == repr(second) or bool(first == second)  # on the safe side: perhaps the same
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
    """The types that a schema may have; none: not known."""
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
