"""Errors of wrong requests name the client's own fields, in the words of JSON, for each API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from nearfar.auto_models import auto_models
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import EngineRequest, ModelInfo, Prepared
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.fields import Strict
from nearfar.fallback_server.http.ignoring import HEADER
from nearfar.fallback_server.http.names import in_own_words
from scripts.server_fields import PATHS
from tests.support.bodies import BASES, QUESTION
from tests.support.turns import share
from tests.unit.test_server_requests import EchoEngine

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DECISIONS, RERANK, SCORE, TOKENIZE = "/v1/decisions", "/v1/rerank", "/v1/score", "/v1/tokenize"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
FOO = {"type": "foo"}
FUNCTION = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
F = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "f"}}
NOT_OBJECT = "this must be a schema of type object, because the arguments of a call are an object, not "


class Hinted(EchoEngine):
    """An engine whose chat template follows no hint."""

    async def prepare(self, request: EngineRequest) -> Prepared:
        made = await super().prepare(request)
        return Prepared(request, made.prompts, 5, ignored=tuple(hint.name for hint in request.hints))


@pytest.fixture(scope="module")
def http() -> TestClient:
    return TestClient(create_app(Hinted()), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def strict() -> TestClient:
    return TestClient(create_app(Hinted(), AppOptions(strict_fields=True)), raise_server_exceptions=False)


def asked(**input_: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", **input_}


def choice(*values: Any) -> dict[str, Any]:
    listed = [{"value": value} for value in values]
    return {"type": "choice", "instructions": "Which?", "choices": listed}


def told(http: TestClient, path: str, fields: dict[str, Any]) -> tuple[str, str | None]:
    """The message and the field of an error."""
    answer: httpx.Response = http.post(path, json={**BASES[path], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return (error, None) if isinstance(error, str) else (error["message"], error.get("param"))


CASES: list[tuple[str, dict[str, Any], str]] = [
    # lower bounds
    (DECISIONS, {"questions": [choice("a")]},
     "questions.0.choices: this must have at least 2 entries, not 1"),
    (DECISIONS, {"questions": []}, "questions: this must not be empty"),
    (MESSAGES, {"messages": [{"role": "user", "content": []}]}, "messages: there is nothing to answer"),
    (MESSAGES, {"messages": [{"role": "user", "content": [FOO]}]}, "messages: there is nothing to answer"),
    (SCORE, {"items": []}, "items: this must not be empty"),
    # names of unions and of Python
    (MESSAGES, {"system": 5}, "system: this must be a string or a list, not 5"),
    (MESSAGES, {"system": [{"type": "image"}]}, "system.0.type: this must be 'text', not 'image'"),
    (GENERATE, {"system": 5}, "system: this must be a string, not 5"),
    (CHAT, {"thinking": FOO}, "thinking.type: this must be 'enabled', 'adaptive' or 'disabled', not 'foo'"),
    (RESPONSES, {"tool_choice": FOO},
     "tool_choice.type: this must be 'function' or 'allowed_tools', not 'foo'"),
    (RERANK, {"query": []}, "query: this must be a string or an object, not a list"),
    (RERANK, {"query": ""}, "query: this must not be empty"),
    (DECISIONS, {"questions": [{"instructions": "Is it?"}]}, "questions.0.type: this field is missing"),
    (DECISIONS, {"questions": ["x"]}, "questions.0: this must be an object, not 'x'"),
    (DECISIONS, {"questions": [{**QUESTION, "type": 5}]},
     "questions.0.type: this must be 'predicate', 'choice' or 'score', not 5"),
    (DECISIONS, {"questions": [choice(1, "b")]},
     "questions.0.choices.0.value: this must be a string or true or false, not 1"),
    (DECISIONS, {"input": []}, "input: there is nothing to answer"),
    (RESPONSES, {"input": [asked(role="foo", content="x")]},
     "input.0.role: this must be 'user', 'assistant', 'system' or 'developer', not 'foo'"),
    (RESPONSES, {"input": [5]}, "input.0: this must be an object, not 5"),
    (RESPONSES, {"tools": [{"type": "function", "function": {"name": "f"}}]},
     "tools.0.name: this field is missing"),
    (CHAT, {"temperature": True}, "temperature: this must be a number, not true"),
    (CHAT, {"messages": [None]}, "messages.0: this must be an object, not null"),
    (CHAT, {"messages": [{"role": "user", "content": None}]},
     "messages.0.content: this must be a string or a list of parts, not null"),
    (CHAT, {"stop": ["é", True]}, "stop.1: this must be a string, not true"),
    (CHAT, {"tool_choice": "é\n"},
     r"tool_choice: this must be 'none', 'auto' or 'required' or an object, not 'é\n'"),
    # names of the chat completion that a request becomes
    (RESPONSES, {"input": ""}, "input: there is nothing to answer"),
    (RESPONSES, {"input": None}, "input: there is nothing to answer"),
    (RESPONSES, {"input": [{"type": "web_search_call"}]}, "input: there is nothing to answer"),
    (DECISIONS, {"input": [{"type": "web_search_call"}]}, "input: there is nothing to answer"),
    (RESPONSES, {"input": [asked(content=[{"type": "input_text"}])]},
     "input.0.content.0: a part of type 'input_text' needs the field 'text'"),
    (RESPONSES, {"input": [{"type": "web_search_call"}, asked(content=[{"type": "input_image"}])]},
     "input.1.content.0: only parts of type 'input_text' are taken, not 'input_image'"),
    (DECISIONS, {"input": [asked(content=[{"type": "input_image"}])]},
     "input.0.content.0: only parts of type 'input_text' are taken, not 'input_image'"),
    (MESSAGES, {"messages": [{"role": "user", "content": [FOO, {"type": "image", "source": {}}]}]},
     "messages.0.content.1: only blocks of type 'text' are taken, not 'image'; this server reads no images"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "s"}, {"name": "f", "input_schema": FOO}]},
     f"tools.1.input_schema: {NOT_OBJECT}" + '{"type": "foo"}'),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": FOO}]},
     f"tools.0.parameters: {NOT_OBJECT}" + '{"type": "foo"}'),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": FOO}}]},
     f"tools.0.function.parameters: {NOT_OBJECT}" + '{"type": "foo"}'),
    (OLLAMA, {"options": {"temperature": -1}}, "options.temperature: this must be at least 0, not -1"),
    # the first entry of a list
    (RERANK, {"documents": [5]}, "documents.0: this must be a string or an object, not 5"),
    (CHAT, {"stop": [5]}, "stop.0: this must be a string, not 5"),
    (CHAT, {"messages": [{"role": "user", "content": [5]}]},
     "messages.0.content.0: this must be an object, not 5"),
    (SCORE, {"items": [5]}, "items.0: this must be a string or a list, not 5"),
    (SCORE, {"query": ["a"]}, "query.0: this must be a whole number, not 'a'"),
    (SCORE, {"items": None, "labels": None, "text_1": "a", "text_2": [5]},
     "text_2.0: this must be a string, not 5"),
    ("/v1/completions", {"prompt": [1.5]},
     "prompt.0: this must be a whole number or a string or a list, not 1.5"),
    ("/v1/embeddings", {"input": [None]},
     "input.0: this must be a whole number or a string or a list, not null"),
    # an item by reference
    (RESPONSES, {"input": [asked(content="x"), {"type": "item_reference", "id": "f"}]},
     "input.1.id: there is no item 'f' here"),
    # a schema as text
    (CHAT, {"structured_outputs": {"json": "{"}},
     "structured_outputs.json: the schema is not valid JSON: it ends at line 1, column 1, inside an object"),
    (CHAT, {"guided_json": "{"},
     "guided_json: the schema is not valid JSON: it ends at line 1, column 1, inside an object"),
    # tools that may be called
    (RESPONSES, {"tools": [FUNCTION], "tool_choice": {**ALLOWED, "tools": []}},
     "tool_choice.tools: this must not be empty"),
    (RESPONSES, {"tools": [FUNCTION], "tool_choice": {**ALLOWED, "tools": [{"type": "web_search"}]}},
     "tool_choice.tools: none of these tools is a function, and no others run here: allow a function"),
    # values that say nothing, or contradict each other
    (RESPONSES, {"input": [asked(content=[])]}, "input.0.content: this must not be empty"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages.0.content: this must not be empty"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}},
     "text.format: type 'json_schema' needs the field 'schema'"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any", "name": "f"}},
     "tool_choice: type 'any' has no field 'name': type 'tool' calls the tool of a name"),
    (DECISIONS, {"questions": [{**QUESTION, "instructions": ""}]},
     "questions.0.instructions: this must not be empty"),
    (DECISIONS, {"questions": [{**QUESTION, "instructions": [{"type": "input_text", "text": ""}]}]},
     "questions.0.instructions: this must not be empty"),
    (DECISIONS, {"questions": [{**QUESTION, "name": "q"}, QUESTION, {**QUESTION, "name": "q"}]},
     "questions.2.name: an earlier question has this name: give each its own, not 'q'"),
    (DECISIONS, {"questions": [{"type": "score", "instructions": "How?",
                                "levels": [{"label": "a"}, {"label": "b"}, {"label": "a"}]}]},
     "questions.0.levels.2.label: an earlier level has this label: give each its own, not 'a'"),
    (DECISIONS, {"questions": [choice("a", True, "b", True)]},
     "questions.0.choices.3.value: an earlier choice has this value: give each its own, not true"),
    # a label and a document
    (SCORE, {"labels": ["a", ""]}, "labels.1: this must not be empty"),
    (CHAT, {"structured_outputs": {}},
     "structured_outputs needs exactly one of json, json_object, regex, choice and grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "said"), CASES)
def test_a_fault_is_told_with_its_place_and_value(
    http: TestClient, path: str, fields: dict[str, Any], said: str
) -> None:
    message, param = told(http, path, fields)
    assert message[: len(said)] == said, message
    if param is not None:
        assert param == said.replace(":", " ").replace(".", " ").split()[0]


STRICT: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"stream": True, "stream_options": {"include_usage": True}},
     "unknown field stream_options.include_usage; there is include_obfuscation"),
    (CHAT, {"thinking": {"type": "disabled", "zz": 1}}, "unknown field thinking.zz"),
    (CHAT, {"tools": [F], "tool_choice": {**NAMED, "zz": 1}}, "unknown field tool_choice.zz"),
    (CHAT, {"tools": [F], "tool_choice": {**NAMED, "function": {"name": "f", "zz": 1}}},
     "unknown field tool_choice.function.zz"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "f", "zz": 1}}, "unknown field tool_choice.zz"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "c"}]},
     "tools.0: an entry of type 'custom' is not known here; leave it out"),
    (RESPONSES, {"include": ["file_search_call.results"]},
     "include.0: 'file_search_call.results' is not known here; leave it out"),
    (CHAT, {"prediction": {"type": "content"}}, "prediction: this changes nothing here; leave the field out"),
    (OLLAMA, {"options": {"num_ctx": 4096}}, "options.num_ctx: this changes nothing here; "
     "set it when the server starts"),
    (CHAT, {"user": ["é"]}, "user: this must be a string, not a list"),
    (CHAT, {"reasoning_effort": "low"},
     "reasoning_effort: this model's chat template has no variable for it"),
    (RESPONSES, {"reasoning": {"effort": "low"}},
     "reasoning.effort: this model's chat template has no variable for it"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "said"), STRICT)
def test_a_strict_server_says_which_field_it_does_not_take(
    strict: TestClient, path: str, fields: dict[str, Any], said: str
) -> None:
    assert told(strict, path, fields)[0][: len(said)] == said


@pytest.mark.parametrize(("path", "fields", "named"), [
    (RESPONSES, {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}},
     "reasoning.effort, text.verbosity"),
    (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens, thinking"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
     "response_format.json_schema.name"),
    (OLLAMA, {"think": True, "options": {"num_ctx": 3}}, "options.num_ctx, think"),
    (RESPONSES, {"tools": [FUNCTION], "tool_choice": {**ALLOWED, "tools": [{**FUNCTION, "zz": 1}]}},
     "tool_choice.tools.zz"),
    (RESPONSES, {"max_tool_calls": -1}, "max_tool_calls"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens, thinking"),
])  # fmt: skip
def test_the_header_names_ignored_fields_as_the_client_does(
    http: TestClient, path: str, fields: dict[str, Any], named: str
) -> None:
    answer: httpx.Response = http.post(path, json={**BASES[path], **fields})
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, named), answer.text


@pytest.mark.parametrize(("body", "said"), [
    (b'{"a": NaN}', "JSON has no NaN (line 1, column 7): send null, or leave the field out"),
    (b'{"a": -Infinity}', "JSON has no -Infinity (line 1, column 7)"),
    (b'{"a" 1}', "a colon must be behind a field's name at line 1, column 6, not '1'"),
    (b'{"a": 1 "b": 2}', "a comma or the end of the object must be at line 1, column 9, not '\"'"),
    (b'{"a": [1 2]}', "a comma or the end of the list must be at line 1, column 10, not '2'"),
    ('\ufeff{"a": 1}'.encode("utf-16-le"), "its bytes are not UTF-8 at line 1, column 1"),
    ('{"a": é}'.encode(), "a value must be at line 1, column 7, not 'é'"),
    (b'{"a": None}', "None is null in JSON (line 1, column 7)"),
    (b'{"a": "\\ud800"}', r"half of a surrogate pair (\uD800 to \uDFFF) is alone in a string"),
    (b'{"a": "\xff"}', "its bytes are not UTF-8 at line 1, column 8"),
    (b'{"a": ', "it ends at line 1, column 6, where a value is missing"),
    (b'{"a": 1,}', "there is a comma and no value behind it, before line 1, column 9"),
    (b"{'a': 1}", "a field's name must be in double quotes at line 1, column 2, not '''"),
    (b'{"a": 1} x', "there is more text behind the value, at line 1, column 10: 'x'"),
    (b'{\n"a": hello}', "a value must be at line 2, column 6, not 'hello'"),
])  # fmt: skip
def test_text_that_is_no_json_is_told_with_its_place(http: TestClient, body: bytes, said: str) -> None:
    answer = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert error["message"].startswith(f"the body is not valid JSON: {said}"), error["message"]


@pytest.mark.parametrize(("body", "said"), [
    (b"[" * 100_000, "the body is nested more than 64 levels deep"),
    (b"null", "the body is null, not a JSON object: send an object with the fields of the request"),
    (b"true", "the body is true, not a JSON object: send an object with the fields of the request"),
    (b"", "the body is empty: send an object with the fields of the request"),
])  # fmt: skip
def test_a_body_that_is_no_object_is_told_by_what_it_is(http: TestClient, body: bytes, said: str) -> None:
    answer = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


@pytest.mark.parametrize(("method", "path", "status", "said"), [
    ("POST", "/v1/responses/compact", 404, "there is no /v1/responses/compact here"),
    ("GET", "/v1/responses/input_tokens", 405, "/v1/responses/input_tokens takes POST, not GET"),
    ("GET", "/v1/responses/resp_1", 404, "there is no response 'resp_1' here"),
    ("GET", "/v1/responses/compacted", 404, "there is no response 'compacted' here"),
    ("GET", "/v1/responses/resp_1/input_items", 404, "there is no response 'resp_1' here"),
])  # fmt: skip
def test_a_path_of_responses_is_no_id(
    http: TestClient, method: str, path: str, status: int, said: str
) -> None:
    answer = http.request(method, path, json={} if method == "POST" else None)
    assert (answer.status_code, answer.json()["error"]["message"][: len(said)]) == (status, said)


def test_the_missing_name_of_a_model_has_the_code_of_other_wrong_fields(
    http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hinted, "models", lambda _: (ModelInfo("a", 100), ModelInfo("b", 100)))
    monkeypatch.setattr(Hinted, "passes_on", True)
    error = http.post(CHAT, json=BASES[CHAT]).json()["error"]
    assert (error["param"], error["code"]) == ("model", "invalid_request")


@pytest.mark.parametrize(("text", "said"), [
    ("{", "is not valid JSON: it ends at line 1, column 1, inside an object"),
    ('{"policy": {"zz": 1}}', ": "),
    ("[]", ": "),
])  # fmt: skip
def test_an_error_of_the_routing_policy_names_its_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "policy.json"
    file.write_text(text)
    with pytest.raises(RequestError) as caught:
        auto_models("a,b", file)
    assert re.match(rf"--auto-policy {re.escape(str(file))} ?{re.escape(said)}", str(caught.value))


WRONG: list[Any] = [None, True, 5, -1.5, "é\n", "", [], {}, [None], [{}], [[]], {"type": "x"}, {"x": None},
                    [{"type": "message", "role": "x"}], [{"role": "user"}], ["a", 1]]  # fmt: skip
"""Values that are wrong in most fields."""
INTERNAL = re.compile(
    r"None|True|False|constrained|literal\[|function-|list\[|pydantic|_kind|tools\[|Input should|"
    r"\bint\b|\bstr\b"
)


@pytest.mark.parametrize("path", BASES)
def test_no_error_names_what_the_client_does_not_know(strict: TestClient, path: str) -> None:
    """For each field and for wrong values: the error names a place of the request, in words of JSON."""
    classes = re.compile("|".join(rf"\b{each.__name__}\b" for each in _all(Strict) if each is not Strict))
    names = [field.alias or name for name, field in PATHS[path].model_fields.items()]
    for name, value in share([(name, value) for name in names for value in WRONG], 5):
        body = {**BASES[path], name: value}
        answer = strict.post(path, json=body)
        if answer.status_code == 200:
            continue
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        param = None if isinstance(error, str) else error.get("param")
        assert not INTERNAL.search(message), (body, message)
        assert not classes.search(message), (body, message)
        assert "messages" in names or "messages" not in message, (body, message)
        assert param is None or param.split(".")[0] in body or "missing" in message, (body, error)


def _all(kind: type[Strict]) -> Iterator[type[Strict]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _all(each)


def test_ignored_fields_of_any_form_do_not_hide_the_place_of_a_tool() -> None:
    request = Request({"type": "http", "path": MESSAGES, "headers": [], "state": {}})
    request.state.sent = {
        "tools": [5, {"name": 5, "function": "g", "tools": [5, {"name": 5}]}, {"name": "g", "tools": 5}]
    }
    said = "tools: the JSON schema of 'g' cannot be enforced at #: 'not'"
    assert in_own_words(request, said, "tools") == (said.replace("tools", "tools.2"), "tools")
