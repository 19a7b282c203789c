"""The table of request fields (docs/server-fields.md) states correctly how the server handles each field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import httpx
import pytest
from starlette.testclient import TestClient

from nearfar.fallback_server.engines.base import EngineRequest, Prepared
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.fields import Only, Strict
from nearfar.fallback_server.http.ignoring import HEADER
from scripts.server_fields import PAGE, PATHS, FieldClass, Row, filled, models_of, row_of, rows
from tests.support.bodies import BASES, HELLO, QUESTION, within
from tests.unit.test_server_requests import MODEL, EchoEngine

SCHEMA = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ODD = [[{}]]
"""A value that no typed field accepts."""

PAIRS = [
    (names, {"items": None, "labels": None, **dict.fromkeys(names, "Hello")})
    for names in (("text_1", "text_2"), ("queries", "documents"))
]
"""The two names of each text of a pair, and a request with them."""

SAMPLED: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "presence_penalty": 1.0, "seed": 3,
    "frequency_penalty": 1.0, "stop": "x",
}  # fmt: skip
OF_ALL: dict[str, Any] = {**SAMPLED, "model": "another", "stream": True}
COMPLETED: dict[str, Any] = {
    **OF_ALL, "n": 2, "repetition_penalty": 1.5, "logit_bias": {"3": 1.0}, "stop_token_ids": [3],
    "stream_options": ({"stream": True}, {"include_usage": True}), "ignore_eos": True, "min_tokens": 3,
    "priority": 3, "cache_salt": "x", "response_format": FORM, "structured_outputs": {"regex": "a"},
    "guided_json": SCHEMA, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": 'root ::= "a"',
    "max_tokens": 3,
}  # fmt: skip
NESTED: dict[str, Any] = {
    "stream_options.include_usage": ({"stream": True}, True),
    "stream_options.continuous_usage_stats": ({"stream": True}, True),
}
ANTHROPIC: dict[str, Any] = {
    "model": "another", "messages": [{"role": "user", "content": "Bye"}], "system": "Be short.",
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": ({"tools": [{"name": "f", "input_schema": SCHEMA}]}, {"type": "any"}),
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "output_config.format": {"type": "json_schema", "schema": SCHEMA},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
}  # fmt: skip
RERANKED: dict[str, Any] = {
    "model": "another", "query": "Bye", "documents": ["a", "c"], "top_n": 1, "return_documents": True,
    "instruction": "Be strict.",
}  # fmt: skip
OLLAMA: dict[str, Any] = {
    "model": "another", "stream": False, "format": "json", "options": {"seed": 3},
    **{f"options.{name}": value for name, value in SAMPLED.items()},
    "options.repeat_penalty": 1.5, "options.num_predict": 3,
}  # fmt: skip
BYE: dict[str, Any] = {"model": "another", "input": "Bye", "dimensions": 1}
SPOKEN = ({"messages": [*HELLO, {"role": "assistant", "content": "I"}], "prompt": None}, True)

CASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **COMPLETED, **NESTED, "messages": [{"role": "user", "content": "Bye"}], "max_completion_tokens": 3,
        "logprobs": True, "top_logprobs": ({"logprobs": True}, 2), "tools": TOOLS,
        "tool_choice": ({"tools": TOOLS}, "required"), "parallel_tool_calls": ({"tools": TOOLS}, False),
        "continue_final_message": SPOKEN, "add_generation_prompt": False, "include_reasoning": False,
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/completions": {
        **COMPLETED, **NESTED, "prompt": "Bye", "logprobs": 2, "echo": True,
    },
    "/v1/responses": {
        **OF_ALL, "input": "Bye", "instructions": "Be short.", "max_output_tokens": 3, "tools": [
            {"type": "function", "name": "f"}
        ], "tool_choice": ({"tools": [{"type": "function", "name": "f"}]}, "required"),
        "parallel_tool_calls": ({"tools": [{"type": "function", "name": "f"}]}, False),
        "repetition_penalty": 1.5, "text": {"format": {"type": "json_object"}},
        "text.format": {"type": "json_object"}, "top_logprobs": 2, "cache_salt": "x", "priority": 3,
        "include": ["message.output_text.logprobs"], "store": False, "previous_response_id": "no_such",
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/messages": {
        **ANTHROPIC, "max_tokens": 3, "stream": True, "temperature": 0.5, "top_p": 0.5, "top_k": 3,
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": ANTHROPIC,
    "/v1/embeddings": {**BYE, "encoding_format": "base64", "pooling": "last"},
    "/v1/decisions": {
        "model": "another", "input": "Bye", "questions": [{**QUESTION, "instructions": "Is it long?"}],
        "neutral": "Nothing", "chat_template_kwargs": {"a": 1},
    },
    "/v1/score": {
        "model": "another", "query": "Hi", "items": ["Bye"], "labels": ["a", "b"],
        "label_token_ids": ({"labels": None, "label_token_ids": [1, 2]}, [2, 3]), "apply_softmax": True,
        "item_first": ({"query": "Hi"}, True),
        **{name: (pair, ["Bye"]) for names, pair in PAIRS for name in names},
    },
    "/v1/rerank": RERANKED,
    "/v2/rerank": RERANKED,
    "/v1/tokenize": {
        "model": "another", "prompt": "Bye",
        "messages": ({"prompt": None, "messages": HELLO}, [{"role": "user", "content": "Bye"}]),
        "return_token_strs": True,
        "tools": ({"prompt": None, "messages": HELLO}, TOOLS), "continue_final_message": SPOKEN,
        "add_generation_prompt": ({"prompt": None, "messages": HELLO}, False),
        "chat_template_kwargs": ({"prompt": None, "messages": HELLO}, {"a": 1}),
    },
    "/v1/detokenize": {"model": "another", "tokens": [1, 2]},
    "/api/chat": {**OLLAMA, "messages": [{"role": "user", "content": "Bye"}], "tools": TOOLS},
    "/api/generate": {**OLLAMA, "prompt": "Bye", "system": "Be short.", "raw": True},
    "/api/embed": BYE,
    "/api/embeddings": {"model": "another", "prompt": "Bye"},
    "/api/show": {"model": "another", "name": ({"model": None}, "another")},
}  # fmt: skip
"""For each field that is followed, a value that changes the answer, if necessary with other fields that it
needs.
"""
SHOWN = ("", "stream_options.", "text.", "options.", "output_config.")
HOLDERS = ("reasoning", "stream_options", "best_of")
"""Objects of which all fields have another class, and a field that must repeat another one."""
"""The places whose fields the cases cover; tests of each API cover messages, tools and formats."""


class Noting(EchoEngine):
    """Keeps the last request that reached the engine."""

    asked: EngineRequest | None = None

    async def prepare(self, request: EngineRequest) -> Prepared:
        self.asked = replace(request, id="", body={})
        return await super().prepare(request)


@pytest.fixture(scope="module")
def engine() -> Noting:
    return Noting()


@pytest.fixture(scope="module")
def http(engine: Noting) -> TestClient:
    return TestClient(create_app(engine), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def strict(engine: Noting) -> TestClient:
    return TestClient(create_app(engine, AppOptions(strict_fields=True)), raise_server_exceptions=False)


def send(http: TestClient, path: str, body: dict[str, Any]) -> httpx.Response:
    given = {name: value for name, value in {"model": MODEL, **body}.items() if value is not None}
    made: Any = http.post(path, json=given)
    return made  # type: ignore[no-any-return]


def seen(http: TestClient, engine: Noting, path: str, body: dict[str, Any]) -> tuple[Any, int, str]:
    """The request that reached the engine, and the answer without ids and times."""
    engine.asked = None
    made = send(http, path, body)
    text = re.sub(
        r'"[a-z]+[_-][0-9a-f]{16,}"|"\w+_at": ?"?[^,"]+"?|"(created|\w*duration)": ?\d+', "", made.text
    )
    return engine.asked, made.status_code, text


def unions(kind: Any, told: bool = False) -> Iterator[list[Any]]:
    """The members of all unions in a type that no discriminator tells apart. `told`: whether one tells apart
    those of the type itself.
    """
    arguments = list(get_args(kind))
    if get_origin(kind) is Annotated:
        yield from unions(arguments[0], any(getattr(mark, "discriminator", None) for mark in arguments[1:]))
        return
    if get_origin(kind) in (Union, UnionType) and not told:
        yield [each.__origin__ if get_origin(each) is Annotated else each for each in arguments]
    for each in arguments if get_origin(kind) is not Literal else ():
        yield from unions(each)


def found(path: str, *kinds: FieldClass) -> list[Row]:
    return [each for each in rows(PATHS[path]) if each.kind in kinds and each.place in SHOWN]


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text, "run: python scripts/server_fields.py"


def test_every_request_with_a_body_has_a_table() -> None:
    paths = create_app(Noting()).openapi()["paths"]
    found = {path for path, ways in paths.items() if "requestBody" in ways.get("post", {})}
    assert found - {"/v1/responses/input_tokens"} == PATHS.keys()  # that one has the fields of /v1/responses


@pytest.mark.parametrize("path", PATHS)
def test_a_followed_field_changes_the_answer(http: TestClient, engine: Noting, path: str) -> None:
    cases = CASES[path]
    known = {row.path for row in found(path, FieldClass.FOLLOWED)}
    assert known - {*HOLDERS} == cases.keys() - {*HOLDERS}
    for field, case in cases.items():
        needs, value = case if isinstance(case, tuple) else ({}, case)
        base = {**BASES[path], **needs}
        before = seen(http, engine, path, base)
        assert before[1] == 200, (field, before[2])
        assert seen(http, engine, path, base) == before, f"{field}: a second request differs by itself"
        assert seen(http, engine, path, {**base, **within(field, value)}) != before, field
        refused = send(http, path, {**base, **within(field, ODD)})
        assert refused.status_code in (400, 404), (field, refused.text)


@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_says_nothing_takes_any_value(
    http: TestClient, strict: TestClient, engine: Noting, path: str
) -> None:
    """A value of another type is named, or refused by a strict server."""
    before = seen(http, engine, path, BASES[path])
    for row in found(path, FieldClass.IGNORED):
        needs = {"stream": True} if row.place == "stream_options." else {}
        before = seen(http, engine, path, {**BASES[path], **needs})
        odd = {**BASES[path], **needs, **within(row.path, ODD)}
        assert seen(http, engine, path, odd) == before, row
        assert send(http, path, odd).headers[HEADER] == row.name, row
        refused = send(strict, path, odd)
        assert (refused.status_code, row.name in refused.text) == (400, True), (row, refused.text)


def test_kinds_of_objects_are_told_apart_before_they_are_read() -> None:
    """An object that is tried as one kind after another would name the fields of the other kinds."""
    for model in PATHS.values():
        for kind in models_of(model):
            for name, field in kind.model_fields.items():
                for united in unions(field.annotation, field.discriminator is not None):
                    kinds = [each for each in united if isinstance(each, type) and issubclass(each, Strict)]
                    assert len(kinds) < 2, (kind, name, kinds)


def test_every_field_that_says_nothing_has_a_type() -> None:
    """Without one, no value would be of another type, and none would be named."""
    for model in PATHS.values():
        for kind in models_of(model):
            for name, field in kind.model_fields.items():
                if row_of(kind.place, name, field).kind is FieldClass.IGNORED:
                    typed = field.annotation is not Any
                    assert typed or any(isinstance(one, Only) for one in field.metadata), (kind, name)


@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_cannot_be_followed_takes_neutral_values_only(
    http: TestClient, engine: Noting, path: str
) -> None:
    for row in found(path, FieldClass.NEUTRAL):
        for value in map(json.loads, ("null", *row.values)):
            made = send(http, path, {**BASES[path], **within(row.path, value)})
            assert (made.status_code, HEADER in made.headers) == (200, False), (row, made.text)
        made = send(http, path, {**BASES[path], **within(row.path, ODD)})
        assert made.status_code == 400, (row, made.text)
        assert row.name in made.text, row


@pytest.mark.parametrize("path", PATHS)
def test_a_hint_reaches_the_engine_and_an_unknown_field_is_named(
    http: TestClient, engine: Noting, path: str
) -> None:
    for row in found(path, FieldClass.HINT):
        value: Any = {"type": "disabled"} if path.startswith("/v1/messages") else "low"
        value = "low" if row.place or "effort" in row.name else value
        value = (
            False if row.name == "enable_thinking" or (row.name == "thinking" and value == "low") else value
        )
        seen(http, engine, path, {**BASES[path], **within(row.path, value)})
        assert engine.asked is not None
        assert engine.asked.hints, row
    made = send(http, path, {**BASES[path], "no_such_field": 1})
    assert (made.status_code, made.headers[HEADER]) == (200, "no_such_field"), made.text


def test_tools_may_be_long_and_their_schemas_are_bounded_apart(http: TestClient) -> None:
    described = [
        {"type": "function", "function": {"name": f"f{at}", "description": "x" * 9000, "parameters": SCHEMA}}
        for at in range(100)
    ]
    body = {"messages": HELLO, "tools": described}
    assert send(http, "/v1/chat/completions", body).status_code == 200
    described[0]["function"]["description"] = "x" * 200_000  # type: ignore[index]
    made = send(http, "/v1/chat/completions", body)
    assert made.status_code == 400
    assert "1,048,576 bytes" in made.text


def test_vectors_of_2048_inputs(http: TestClient) -> None:
    made = send(http, "/v1/embeddings", {"input": ["x"] * 2048, "dimensions": 1})
    assert [len(each["embedding"]) for each in made.json()["data"]] == [1] * 2048
    assert send(http, "/v1/embeddings", {"input": ["x"] * 2049}).status_code == 400
