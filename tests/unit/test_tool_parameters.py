"""Schemas of tools' arguments with long chains of references, and schemas with requirements beside a
reference.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nearfar.edge_runtime.text.beside import characters
from nearfar.edge_runtime.tools.arguments import arguments_of
from nearfar.edge_runtime.tools.parameters import argument_schema, check_parameters, check_schemas
from nearfar.errors import RequestError


def test_a_chain_of_references_is_followed_to_a_bound() -> None:
    """Before the fix 1,200 references ended in a RecursionError, status 500."""
    names = [f"d{at}" for at in range(1200)]
    links = {name: {"$ref": f"#/$defs/{after}"} for name, after in itertools.pairwise(names)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**links, names[-1]: {"type": "object"}}}
    check_parameters("tools[0].function.parameters", schema)
    assert argument_schema({"parameters": schema})["type"] == "object"


@pytest.mark.parametrize(
    "beside", [{"required": ["city"]}, {"additionalProperties": False}, {"properties": {"a": {}}}]
)
def test_what_stands_beside_a_reference_is_kept(beside: dict[str, Any]) -> None:
    schema = {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"city": {}}}}, **beside}
    assert argument_schema({"parameters": schema}) == {**schema, "type": "object"}
    del schema[next(iter(beside))]
    assert argument_schema({"parameters": schema})["properties"] == {"city": {}}


def test_arguments_that_are_whole_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over their characters took 0.3 s for a megabyte, in each turn of the conversation."""
    monkeypatch.setattr("nearfar.edge_runtime.tools.arguments._completed", None)
    assert arguments_of('{"a": [1, {"b": "c"}]}') == {"a": [1, {"b": "c"}]}
    assert arguments_of("[1]") == {}


def test_a_conversation_is_as_long_as_all_that_it_says() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "x" * 50}}
    parts = [{"type": "text", "text": "12345"}, {"type": "text", "text": "678"}]
    said = {"role": "assistant", "content": None, "reasoning_content": "123", "tool_calls": [call]}
    assert characters([{"role": "user", "content": parts}, said]) == 8 + 3 + 50


def test_descriptions_of_tools_are_not_what_a_grammar_compiles() -> None:
    """Claude Code's 24 tools have 65,261 bytes, most of them descriptions."""

    def tools(size: int) -> list[dict[str, Any]]:
        described = {"description": "x" * 60_000, "x-note": "x" * 60_000, "type": "string"}
        named = {"properties": {"description": {"type": "string", "maxLength": 9}, "p": described}}
        return [{"function": {"parameters": {**named, "required": ["y" * size]}}}] * 8

    check_schemas(tools(7_900))
    with pytest.raises(RequestError, match="65,536"):
        check_schemas(tools(8_200))
    with pytest.raises(RequestError, match="65,536"):  # an answer must have this text
        check_schemas([{"function": {"parameters": {"const": {"description": "x" * 70_000}}}}])
