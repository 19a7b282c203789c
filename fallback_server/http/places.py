"""The place of a fault in a request, as its author wrote the request: field names and list indexes alone.

pydantic's places also name the members of unions: classes, tags and labels that no client knows. Only the
schema says which part is which, so the place is followed through the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

Part = str | int
Schema = Mapping[str, Any]

BODY = "body"
"""The part with which FastAPI begins each place."""
UNKNOWN_FIELDS = "unknown_fields"
"""In the context of one of our own errors: the error is about unknown fields."""


@dataclass(frozen=True)
class RequestPlace:
    """A place in a request. `holder`: the model of the object that has the last part as a field."""

    parts: tuple[Part, ...] = ()
    holder: type[BaseModel] | None = None

    @property
    def text(self) -> str:
        """The place as errors name it, for example "messages.0.content"."""
        return ".".join(map(str, self.parts))

    @property
    def param(self) -> str | None:
        """The field of the request that has the place."""
        return str(self.parts[0]) if self.parts else None


def place_of(model: type[BaseModel] | None, where: Sequence[Part]) -> RequestPlace:
    """Return the place of one of pydantic's errors about `model`. `where`: the error's `loc`."""
    rest = where[1:] if where[:1] == (BODY,) else where
    if model is None:
        return RequestPlace(tuple(rest))
    return max(_walks(model.__pydantic_core_schema__, tuple(rest), {}, None), key=lambda each: each[0])[1]


def fault_at(where: Sequence[Part], message: str, value: object) -> ValidationError:
    """Return an error about a place in the value that is being validated, for example an entry of a list."""
    return _error([(tuple(where), PydanticCustomError("value_error", "{said}", {"said": message}), value)])


def differing(given: object, message: str, name: str | None = None) -> None:
    """Raise an error about the first entry of a list that equals an earlier one; with `name`, about the first
    one whose field of this name does. Objects and null are left to other checks.
    """
    met = set[tuple[type, object]]()
    for at, item in enumerate(given if isinstance(given, list) else ()):
        value = item
        if name is not None:
            value = item.get(name) if isinstance(item, dict) else getattr(item, name, None)
        if not isinstance(value, str | bool | int):
            continue
        if (type(value), value) in met:
            raise fault_at((at,) if name is None else (at, name), message, value)
        met.add((type(value), value))


def moved(error: ValidationError, indexes: Sequence[int]) -> ValidationError:
    """Return the errors about a list with the indexes of another one. `indexes`: the index there of each
    entry.
    """
    return _error([(_moved(each["loc"], indexes), _custom(each), each["input"]) for each in error.errors()])


def unknown_fields(error: ValidationError) -> ValidationError | None:
    """Return the errors about unknown fields alone; None where there is none."""
    found = [
        (each["loc"], _custom(each), each["input"])
        for each in error.errors()
        if each["type"] == "extra_forbidden" or UNKNOWN_FIELDS in each.get("ctx", {})
    ]
    return _error(found) if found else None


def _moved(where: tuple[Part, ...], indexes: Sequence[int]) -> tuple[Part, ...]:
    first = next((at for at, part in enumerate(where) if isinstance(part, int)), None)
    return where if first is None else (*where[:first], indexes[int(where[first])], *where[first + 1 :])


def _custom(error: ErrorDetails) -> PydanticCustomError:
    return PydanticCustomError(error["type"], error["msg"], error.get("ctx"))


def _error(found: Sequence[tuple[tuple[Part, ...], PydanticCustomError, object]]) -> ValidationError:
    errors = [InitErrorDetails(type=kind, loc=where, input=value) for where, kind, value in found]
    return ValidationError.from_exception_data("request", errors)


def _walks(
    schema: Schema, where: tuple[Part, ...], defined: dict[str, Schema], holder: type[BaseModel] | None
) -> Iterator[tuple[int, RequestPlace]]:
    """Yield the places that `where` may mean below a schema, each with the number of parts that were
    understood. Only a union without tags has several.
    """
    if not where:
        yield 0, RequestPlace((), holder)
        return
    part, rest = where[0], where[1:]
    match schema["type"]:
        case "definitions":
            defined.update({each["ref"]: each for each in schema["definitions"]})
            yield from _walks(schema["schema"], where, defined, holder)
        case "definition-ref":
            yield from _walks(defined[schema["schema_ref"]], where, defined, holder)
        case "model":
            yield from _walks(schema["schema"], where, defined, schema["cls"])
        case "model-fields":
            field = _field(schema["fields"], str(part))
            if field is None:
                yield 0, RequestPlace((part,), holder)
                return
            below = _walks(field, rest, defined, holder)
            yield from (_below(part, each, holder) for each in below)
        case "tagged-union" if part in schema["choices"]:
            for count, place in _walks(schema["choices"][part], rest, defined, holder):
                yield count + 1, place
        case "tagged-union" | "union":
            # An index is not a label, and neither is another name than a tag: a validator around the union
            # gave the place.
            label = isinstance(part, str) and schema["type"] == "union"
            for each in _members(schema):
                for count, place in _walks(each, rest if label else where, defined, holder):
                    yield count + label, place
        case "list":
            if isinstance(part, int):
                items = _walks(schema.get("items_schema", {"type": "any"}), rest, defined, holder)
                yield from (_below(part, each, holder) for each in items)
            else:
                yield 0, RequestPlace((), holder)
        case "dict":
            values = [] if rest[:1] == ("[key]",) else _walks(schema["values_schema"], rest, defined, holder)
            yield from (_below(part, each, holder) for each in values or [(0, RequestPlace())])
        case _ if "schema" in schema:
            yield from _walks(schema["schema"], where, defined, holder)
        case _:
            # A value without parts: the place is below another member of the same union.
            yield -1, RequestPlace((), holder)


def _below(
    part: Part, found: tuple[int, RequestPlace], holder: type[BaseModel] | None
) -> tuple[int, RequestPlace]:
    count, place = found
    return count + 1, RequestPlace((part, *place.parts), place.holder if place.parts else holder)


def _members(schema: Schema) -> list[Schema]:
    """Return the schemas of a union's members."""
    if schema["type"] == "tagged-union":
        return list(schema["choices"].values())
    return [each[0] if isinstance(each, tuple) else each for each in schema["choices"]]


def _field(fields: Mapping[str, Schema], part: str) -> Schema | None:
    """Return the schema of the field that JSON calls `part`."""
    named = ((field.get("validation_alias", name), field) for name, field in fields.items())
    found: Schema | None = next((field["schema"] for name, field in named if name == part), None)
    return found
