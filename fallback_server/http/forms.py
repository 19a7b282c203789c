"""Formats of an answer, in OpenAI's fields and in vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from nearfar.fallback_server.http.fields import (
    SILENT,
    AnyJson,
    JsonObject,
    Name,
    Only,
    Strict,
    few,
    many,
)
from nearfar.format.requests import MAX_GRAMMAR_BYTES

MAX_OPTIONS = 1024
"""Most texts that `choice` of structured_outputs may offer."""


class JsonSchema(Strict):
    """The schema of an answer."""

    place = "response_format.json_schema."
    name: Annotated[Name | None, SILENT] = None
    schema_: JsonObject | None = Field(None, alias="schema")
    description: Annotated[str | None, SILENT] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of the answer. `regex` and `grammar` (EBNF) are extensions of nearfar."""

    place = "response_format."
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_BYTES)
    grammar: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_BYTES)
    # llama.cpp has the schema in this field.
    schema_: Annotated[
        Any, Only(instead='write type "json_schema" and json_schema: {"name": …, "schema": …}')
    ] = Field(None, alias="schema")

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type in ("json_schema", "regex", "grammar") and getattr(self, self.type) is None:
            raise ValueError(f"type {self.type!r} needs the field {self.type!r}")
        return self


class StructuredOutputs(Strict):
    """The format of the answer in vLLM's fields, exactly one of which must be given."""

    place = "structured_outputs."
    json_: AnyJson = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_BYTES)
    choice: Annotated[list[str], many(MAX_OPTIONS, 1), few(MAX_OPTIONS)] | None = None
    grammar: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_BYTES)
    structural_tag: Annotated[Any, Only()] = None
    disable_fallback: Annotated[bool | None, SILENT] = None
    disable_any_whitespace: Annotated[Any, Only((False,))] = None
    disable_additional_properties: Annotated[Any, Only((True,))] = None
    whitespace_pattern: Annotated[Any, Only()] = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(one is not None for one in given) != 1:
            raise ValueError(
                "structured_outputs needs exactly one of json, json_object, regex, choice and grammar"
            )
        if self.json_ is not None and not isinstance(self.json_, str | dict):
            raise ValueError("json must be a JSON schema, as an object or as text")
        return self
