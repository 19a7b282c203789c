"""Structural tags for arguments that are not JSON: nearfar.format.answers.Spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nearfar.edge_runtime.tools.tags import NOTHING, Tag, constant, either, in_order, repeated, tag
from nearfar.errors import RequestError
from nearfar.format.answers import Spelling

KNOWN = frozenset({"type", "enum", "const", "properties", "required", "items", "pattern", "anyOf"})
"""Keywords of a schema that can be enforced in values other than JSON."""
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "format", "additionalProperties"})


def spelled_arguments(spelling: Spelling, schema: Mapping[str, Any]) -> Tag:
    """The arguments of a call, as a tag. `schema`: narrowed, of an object.

    If there is a separator between arguments, required ones come first.
    """
    return _Spelled(spelling, schema).arguments()


class _Spelled:
    """The arguments of one tool."""

    def __init__(self, spelling: Spelling, schema: Mapping[str, Any]) -> None:
        self._spelling, self._root = spelling, schema

    def arguments(self) -> Tag:
        return self._object(self._root, "#")

    def _object(self, schema: Mapping[str, Any], place: str) -> Tag:
        """All arguments, for the schema of an object or for several alternatives."""
        spelling = self._spelling
        if "enum" in schema:
            raise _refusal(place, "enum and const of lists and objects")
        if "anyOf" in schema:
            ways = [self._object(one, f"{place}/anyOf/{at}") for at, one in enumerate(schema["anyOf"])]
            return tag("", either(*ways), "")
        names = (spelling.before_name, spelling.after_name, spelling.after_value)
        return self._members(schema, place, (spelling.begin, spelling.end), names)

    def _members(
        self, schema: Mapping[str, Any], place: str, around: tuple[str, str], names: tuple[str, str, str]
    ) -> Tag:
        """The properties of an object, each `before` + name + `after` + value + `behind`."""
        before, after, behind = names
        required, separator = schema.get("required", ()), self._spelling.separator
        properties = dict(schema.get("properties", {}))
        if separator:
            properties = dict(sorted(properties.items(), key=lambda item: item[0] not in required))
        values = {name: self._value(one, f"{place}/properties/{name}") for name, one in properties.items()}

        def member(name: str, lead: str) -> Tag:
            return tag(lead + before + name + after, values[name], behind)

        def rest(of: list[str], lead: str) -> list[Tag]:
            made = [(name, member(name, lead)) for name in of]
            return [one if name in required else either(one, NOTHING) for name, one in made]

        order = list(properties)
        if not separator or not order:
            parts = rest(order, "")
        elif order[0] in required:
            parts = [member(order[0], ""), *rest(order[1:], separator)]
        else:
            starts = [
                in_order(member(name, ""), *rest(order[at + 1 :], separator)) for at, name in enumerate(order)
            ]
            parts = [either(*starts, NOTHING)]
        return tag(around[0], in_order(*parts) if parts else NOTHING, around[1])

    def _value(self, schema: Any, place: str) -> Tag:
        spelling = self._spelling
        if spelling.raw:
            return self._raw(schema, place)
        if not spelling.quotes and not _has_words(schema):
            return self._json(schema)
        fixed = _fixed(schema)
        if fixed is not None:
            return either(*(self._constant(value, place) for value in fixed))
        return either(*(self._typed(kind, schema, place) for kind in self._kinds(schema, place)))

    def _raw(self, schema: Any, place: str) -> Tag:
        """A raw value: the text up to a mark."""
        kinds = self._kinds(schema, place)
        fixed = _fixed(schema)
        if kinds != ["string"]:
            return self._json(schema)
        if fixed is not None:
            return either(*(constant(value) if value else NOTHING for value in fixed))
        return self._text(schema)

    def _typed(self, kind: str, schema: Mapping[str, Any], place: str) -> Tag:
        spelling = self._spelling
        match kind:
            case "boolean":
                return either(constant(spelling.words[0]), constant(spelling.words[1]))
            case "null":
                return constant(spelling.words[2])
            case "string" if spelling.quotes:
                return tag(spelling.quotes[0], self._text(schema), spelling.quotes[1])
            case "array" if spelling.quotes:
                return self._array(schema, place)
            case "object" if spelling.quotes:
                return self._members(schema, place, ("{", "}"), ("", ":", ""))
            case _:
                bounds = {key: value for key, value in schema.items() if key not in ("anyOf", "type")}
                return self._json({**bounds, "type": kind})

    def _text(self, schema: Mapping[str, Any]) -> Tag:
        if "pattern" in schema:
            return {"type": "regex", "pattern": schema["pattern"].removeprefix("^").removesuffix("$")}
        return {"type": "any_text"}

    def _array(self, schema: Mapping[str, Any], place: str) -> Tag:
        item = self._value(schema.get("items", {"type": "string"}), f"{place}/items")
        if item["type"] == "json_schema":
            return self._json(schema)
        items = item["elements"] if item["type"] == "or" else [item]
        tags = [one if one["type"] == "tag" else tag(one["value"], NOTHING, "") for one in items]
        return tag("[", repeated(tags, ",", schema.get("minItems", 0)), "]")

    def _constant(self, value: Any, place: str) -> Tag:
        spelling = self._spelling
        if isinstance(value, bool) or value is None:
            return constant(spelling.words[2 if value is None else 0 if value else 1])
        if isinstance(value, str) and spelling.quotes:
            return constant(spelling.quotes[0] + value + spelling.quotes[1])
        if isinstance(value, list | dict):
            raise _refusal(place, "enum and const of lists and objects")
        return constant(json.dumps(value, ensure_ascii=False))

    def _kinds(self, schema: Any, place: str) -> list[str]:
        """The types that a value can have; refuses a schema that cannot be enforced."""
        if not isinstance(schema, Mapping):
            raise _refusal(place, f"the schema {schema!r:.60}")
        allowed = KNOWN | ANNOTATIONS | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
                                         "minItems"}  # fmt: skip
        if unknown := sorted(set(schema) - allowed):
            raise _refusal(place, unknown[0])
        if "anyOf" in schema:
            parts = [kind for one in schema["anyOf"] for kind in self._kinds(one, place)]
            if any(set(one) - {"type"} - ANNOTATIONS for one in schema["anyOf"]):
                raise _refusal(place, "anyOf of more than types")
            return list(dict.fromkeys(parts))
        fixed = _fixed(schema)
        kind = schema.get("type") or ("string" if fixed is None else sorted({_kind(v) for v in fixed}))
        return [kind] if isinstance(kind, str) else list(kind)

    def _json(self, schema: Any) -> Tag:
        """A value that is JSON, with the definitions that its references name."""
        defined = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {
            "type": "json_schema",
            "json_schema": {**schema, **defined} if isinstance(schema, Mapping) else schema,
            "strict": False,
            "param": "tools",
        }


def _has_words(schema: Any) -> bool:
    """Whether a value can be true, false or null by itself: the spelling has its own words for them."""
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    if any(value is None or isinstance(value, bool) for value in _fixed(schema) or ()):
        return True
    if any(_has_words(one) for one in schema.get("anyOf", ())):
        return True
    return bool({"boolean", "null"} & set([kinds] if isinstance(kinds, str) else kinds or ()))


def _fixed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, list) else None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds[type(value)]


def _refusal(place: str, what: str) -> RequestError:
    return RequestError(
        f"tools: the schema at {place} cannot be enforced in the way that this model writes arguments: "
        f"{what}; describe the parameter more simply",
        "tools",
    )
