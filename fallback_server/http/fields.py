"""Field types of requests: strict, and bounded before their contents are read.

A body of wrong types must cost no more than a right one. So a list ends at its first wrong element, a union's
member is chosen by the value's type before anything is validated, and a value that is too long is rejected by
its length.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    StringConstraints,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nearfar.edge_runtime.tools.parameters import fits_objects
from nearfar.fallback_server.http.ignoring import ignored, passes_on
from nearfar.fallback_server.http.places import UNKNOWN_FIELDS, unknown_fields
from nearfar.fallback_server.http.words import ENTRY, IDLE, KIND, SHOWN, shown
from nearfar.format.requests import MAX_GRAMMAR_BYTES, MAX_INPUTS, MAX_STOPS
from nearfar.format.sampling import RANGES

MAX_STOP_CHARS = 512
MAX_BIASES = 1024
MAX_PROMPTS = 64
MAX_PROMPT_TOKENS = 1 << 20
MAX_PARTS = 256
UNKNOWN = 16
"""Most unknown fields that are reported one by one."""


def within(parameter: str) -> Any:
    """Return an optional field whose value lies in the range of a sampling parameter."""
    values = RANGES[parameter]
    least, most, above = values.least, values.most, values.above
    return Field(None, gt=least, le=most) if above else Field(None, ge=least, le=most)


_place: ContextVar[str] = ContextVar("place", default="")
"""The `place` of the object whose fields are being validated."""


class Strict(BaseModel):
    """A record without unknown fields, conversions or NaN. `place`: the path of this kind of object in a
    request.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    place: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _known_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop unknown fields where they are ignored or passed on; those that are passed on are not named
        here. Where unknown fields are rejected, count them first: each is a separate error.
        """
        if not isinstance(data, dict):
            return handler(data)
        if (found := ignored.get()) is None:
            if len(data) > len(cls.model_fields) + UNKNOWN:
                raise PydanticCustomError(
                    "value_error",
                    "{given} fields, of which at most {known} can be known here",
                    {"given": f"{len(data):,}", "known": len(cls.model_fields), UNKNOWN_FIELDS: True},
                )
            return handler(data)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in data:
            if name not in known and not passes_on.get():
                found.add(cls.place + name)
        token = _place.set(cls.place)
        try:
            return handler({name: value for name, value in data.items() if name in known})
        finally:
            _place.reset(token)


def _or_ignored(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    try:
        return handler(value)
    except ValidationError as error:
        if (found := ignored.get()) is None:
            first = error.errors()[0]
            if first["type"] != IDLE:
                raise
            raise PydanticCustomError(
                IDLE, "this changes nothing here; {instead}", {"instead": first["ctx"]["instead"]}
            ) from error
        if not passes_on.get():
            found.add(f"{_place.get()}{info.field_name}")
        return None


SILENT = WrapValidator(_or_ignored)
"""Marks a field without effect on the answer: where unknown fields are ignored, a value of another type in
this one is ignored too.
"""


@dataclass(frozen=True)
class _Hint:
    """The type of HINT."""


@dataclass(frozen=True)
class _Passed:
    """The type of PASSED."""


PASSED = _Passed()
"""Marks a field of images, sounds and files: a server behind this one gets them. Where this server computes
the answer, the part that has the field is rejected by its type.
"""
HINT = _Hint()
"""Marks a field that only a chat template can follow. If the template has no variable for it, the field is
ignored, and the answer's header names it.
"""


def _or_passed(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError as error:
        if not passes_on.get():
            raise
        if ignored.get() is None and (unknown := unknown_fields(error)) is not None:
            raise unknown from error
        return None


OPEN = WrapValidator(_or_passed)
"""Marks a field whose forms differ between servers: a form that is unknown here is left to the upstream,
which gets the request as received. Where unknown fields are rejected, those in the form are, too.
"""


def few(most: int) -> BeforeValidator:
    """Return a validator for at most `most` entries, which counts them before reading any."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > most:
            raise ValueError(f"at most {most:,} entries, not {len(value):,}")
        return value

    return BeforeValidator(check)


@dataclass(frozen=True, eq=False)  # with generated equality (1,) would equal (True,)
class Only:
    """A field that takes only null and the values that have no effect. Others are rejected, not ignored.
    `instead`: the advice in the error message.
    """

    values: tuple[Any, ...] = ()
    instead: str = "leave the field out"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """See pydantic."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """See pydantic."""
        return {"enum": [None, *self.values]}

    def idle(self, value: Any) -> bool:
        """Whether a value has no effect."""
        return any(type(value) is type(known) and value == known for known in (None, *self.values))

    def _check(self, value: Any) -> Any:
        if self.idle(value) or passes_on.get():
            return value
        taken = " or ".join(json.dumps(known) for known in self.values)
        taken = f"{taken} here, which changes nothing" if taken else "null here"
        said = {"taken": taken, "instead": self.instead}
        raise PydanticCustomError(IDLE, "this server takes only {taken}; {instead}", said)


def _kind(names: dict[type, str]) -> Callable[[Any], str | None]:
    """Return a function that selects a union's member by the type of the value, or of its first element."""

    def kind(value: Any) -> str | None:
        if isinstance(value, str):
            return "str"
        if not isinstance(value, list):
            return None
        return names.get(type(value[0])) if value else next(iter(names.values()))

    return kind


class _Context(dict[str, Any]):
    """The context of an error, which can be part of an annotation: annotations are hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


_JSON_TYPES = {str: "a string", int: "a whole number", dict: "an object", list: "a list"}


def by(field: str, missing: str | None = None) -> Discriminator:
    """Select a union's member by a field of an object. `missing`: the tag of an object without the field.

    The function has the field's name: an error about the tag names the field by it.
    """

    def tag(value: Any) -> str | None:
        if not isinstance(value, dict | BaseModel):
            return None
        given = value.get(field) if isinstance(value, dict) else getattr(value, field)
        return missing if given is None else given if isinstance(given, str) else shown(given)

    tag.__name__ = field
    return Discriminator(tag)


def one_of(names: dict[type, str], said: str) -> Discriminator:
    """Select a union's member by a list's first element; an empty list selects the first member.

    `said`: the error's words about a value that is not a list, and `names` give those about a first element.
    """
    entry = " or ".join(_JSON_TYPES[each] for each in names if each in _JSON_TYPES)
    return Discriminator(
        _kind(names),
        custom_error_type=KIND,
        custom_error_message=said,
        custom_error_context=_Context({ENTRY: f"this must be {entry}"}),
    )


def many(most: int, least: int = 0) -> Any:
    """A list's bounds; validation stops at its first wrong element."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def _weight(value: Any, most: int) -> int:
    """A lower bound of the bytes of a value as JSON; counting stops above `most`."""
    weight, stack = 0, [value]
    while stack and weight <= most:
        item = stack.pop()
        weight += len(item) + 1 if isinstance(item, str | list | dict) else 1
        if isinstance(item, dict):
            stack += item
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return weight


def _small(value: Any) -> Any:
    if _weight(value, MAX_GRAMMAR_BYTES) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"at most {MAX_GRAMMAR_BYTES:,} bytes of JSON are taken here")
    return value


def _for_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    if not fits_objects(schema):
        raise ValueError(
            "this must be a schema of type object, because the arguments of a call are an object, not "
            f"{json.dumps(schema, ensure_ascii=False)[:SHOWN]}"
        )
    return schema


Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
JsonObject = Annotated[dict[str, Any], BeforeValidator(_small)]
"""A JSON schema: any object, whose size is checked before it is copied."""
Parameters = Annotated[JsonObject, AfterValidator(_for_arguments)]
"""The schema of a function's arguments."""
AnyJson = Annotated[Any, BeforeValidator(_small)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Text = Annotated[str, Tag("str")]
Stops = Annotated[
    Annotated[Stop, Tag("str")] | Annotated[list[Stop], many(MAX_STOPS), few(MAX_STOPS), Tag("list[str]")],
    one_of({str: "list[str]"}, "this must be a string or a list of strings"),
]
Bias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), few(MAX_BIASES)
]
Tokens = Annotated[list[TokenId], many(MAX_PROMPT_TOKENS, 1), few(MAX_PROMPT_TOKENS)]
_SAID = "this must be a string, token ids, or a list of either, and not empty"
_KINDS: dict[type, str] = {int: "list[int]", str: "list[str]", list: "list[list]"}
Prompts = Annotated[
    Text
    | Annotated[Tokens, Tag("list[int]")]
    | Annotated[list[str], many(MAX_PROMPTS), few(MAX_PROMPTS), Tag("list[str]")]
    | Annotated[list[Tokens], many(MAX_PROMPTS), few(MAX_PROMPTS), Tag("list[list]")],
    one_of(_KINDS, _SAID),
]
Inputs = Annotated[
    Text
    | Annotated[Tokens, Tag("list[int]")]
    | Annotated[list[str], many(MAX_INPUTS), few(MAX_INPUTS), Tag("list[str]")]
    | Annotated[list[Tokens], many(MAX_INPUTS), few(MAX_INPUTS), Tag("list[list]")],
    one_of(_KINDS, _SAID),
]
