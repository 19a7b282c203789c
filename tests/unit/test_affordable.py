"""What the grammar of many tools enforces: all of strict ones, and of others as much as can be afforded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nearfar.edge_runtime.tools.affordable import affordable, is_any_object
from nearfar.edge_runtime.tools.asking import AUTO, answer_grammar
from tests.support.followers import Match, served
from tests.unit.test_tool_vectors import READING, form_of

WIDE = {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(9)}}
LONG = {"type": "object", "properties": {"script": {"type": "string", "maxLength": 524288}}}
SMALL = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def tool(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


MANY = [tool(f"wide{at}", WIDE) for at in range(24)] + [tool("small", SMALL), tool("long", LONG)]


def test_schemas_of_few_tools_and_of_strict_ones_are_all_kept() -> None:
    few = [tool("wide", WIDE), tool("small", SMALL)]
    assert affordable(few) == tuple(few)
    strict = [tool(f"strict{at}", WIDE, strict=True) for at in range(24)]
    assert affordable(strict) == tuple(strict)


def test_the_largest_schemas_become_any_object() -> None:
    # measured for 24 tools of a coding agent and 152,000 tokens: 6 s and 474 MB before, 1 s and 37 MB after
    made = affordable(MANY)
    loosened = [one["function"]["name"] for one in made if is_any_object(one)]
    assert loosened == [one["function"]["name"] for one in MANY if one["function"]["name"] != "small"]


@pytest.fixture(scope="module")
def match() -> Match:
    grammar = answer_grammar(form_of(READING["formats"]["hermes"]), affordable(MANY), AUTO, None, False)
    assert grammar is not None
    assert len(json.loads(grammar.text)["format"]["tags"]) == len(MANY) + 1
    return served(grammar)


@pytest.mark.parametrize(
    ("name", "arguments", "right"),
    [
        ("wide3", '{"anything": [1, {"a": null}]}', True),
        ("long", '{"script": "x"}', True),
        ("long", "[1]", False),
        ("small", '{"x": 1}', True),
        ("small", '{"x": "a"}', False),
    ],
)
def test_calls_are_followed_with_marks_and_without(
    match: Match, name: str, arguments: str, right: bool
) -> None:
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    assert match(f"Well: <tool_call>\n{call}\n</tool_call>") is right
    assert match(f"Well: {call}") is right
