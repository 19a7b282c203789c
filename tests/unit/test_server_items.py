"""Items of stored responses as OpenAI's clients read them, and the parameters in the address of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.ignoring import HEADER
from tests.support.bodies import BASES
from tests.unit.test_server_requests import EchoEngine

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def http() -> TestClient:
    return TestClient(create_app(EchoEngine()))


@pytest.fixture(scope="module")
def strict() -> TestClient:
    return TestClient(create_app(EchoEngine(), AppOptions(strict_fields=True)))


def made(http: TestClient, given: Any) -> str:
    answer = http.post(RESPONSES, json={"input": given})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


@pytest.mark.parametrize(("role", "part"), [
    ("user", {"type": "input_text", "text": "c"}),
    ("developer", {"type": "input_text", "text": "c"}),
    ("assistant", {"type": "output_text", "text": "c", "annotations": []}),
])  # fmt: skip
def test_the_content_of_a_listed_message_is_always_a_list_of_parts(
    http: TestClient, role: str, part: dict[str, Any]
) -> None:
    name = made(http, [{"role": role, "content": "c"}, {"role": "user", "content": "d"}])
    _, item = http.get(f"{RESPONSES}/{name}/input_items").json()["data"]
    assert (item["type"], item["role"], item["content"]) == ("message", role, [part])
    reference = {"type": "item_reference", "id": item["id"]}
    for without in ({}, {"type": None}):
        assert http.post(RESPONSES, json={"input": [{**reference, **without}]}).status_code == 200
    assert http.post(RESPONSES, json={"input": [{"id": item["id"]}]}).status_code == 200


def test_the_error_about_a_deleted_response_gives_no_advice_for_a_conversation(http: TestClient) -> None:
    name = made(http, "Hello")
    assert http.delete(f"{RESPONSES}/{name}").status_code == 200
    gone = http.get(f"{RESPONSES}/{name}")
    assert (gone.status_code, "send the whole conversation" in gone.text) == (404, False)


def test_a_failed_stream_ends_with_the_text_that_was_sent(http: TestClient) -> None:
    text = http.post(RESPONSES, json={"input": "fail later", "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    (failed,) = [each["response"] for each in events if each["type"] == "response.failed"]
    sent = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    (item,) = failed["output"]
    assert (failed["status"], item["status"]) == ("failed", "incomplete")
    assert item["content"][0]["text"] == sent != ""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/api/chat", "/v1/tokenize"])
def test_a_slash_at_the_end_of_a_path_changes_nothing(http: TestClient, path: str) -> None:
    given = BASES[path if path.startswith(("/v1", "/api")) else f"/v1{path}"]
    answer = http.post(f"{path}/", json=given, follow_redirects=False)
    assert answer.status_code == 200
    assert http.get("/v1/models/", follow_redirects=False).json()["object"] == "list"


@pytest.mark.parametrize(("path", "has", "lacks"), [
    ("/api/chat", "message", "response"), ("/api/generate", "response", "message"),
])  # fmt: skip
def test_an_answer_to_loading_a_model_has_the_field_of_its_path(
    http: TestClient, path: str, has: str, lacks: str
) -> None:
    answer = http.post(path, json={"model": "echo"}).json()
    assert (answer["done_reason"], has in answer, lacks in answer) == ("load", True, False)
    assert http.post(path, json={"model": "another"}).status_code == 404


def test_a_strict_server_takes_its_own_answer_back(strict: TestClient) -> None:
    first = strict.post(RESPONSES, json={"input": "Hello"}).json()
    said = [{"role": "user", "content": "Hello"}, *first["output"], {"role": "user", "content": "Go on"}]
    assert "annotations" in first["output"][0]["content"][0]
    answer = strict.post(RESPONSES, json={"input": said})
    assert (answer.status_code, answer.headers.get("x-nearfar-ignored")) == (200, None), answer.text


def test_items_of_one_request_have_different_ids(http: TestClient) -> None:
    twice = [{"id": "a", "role": "user", "content": "c"}, {"id": "a", "role": "user", "content": "d"}]
    answer = http.post(RESPONSES, json={"input": twice})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "input"
    assert error["message"] == "input.1.id: an earlier item has this id: give each item its own, not 'a'"


@pytest.mark.parametrize(("query", "named"), [
    ("?zz=1", "?zz"),
    ("?before=x&Limit=3", "?before, ?Limit"),
    ("?include[]=y&order=asc", "?include[]"),
])  # fmt: skip
def test_a_parameter_of_the_address_without_effect_is_named(
    http: TestClient, strict: TestClient, query: str, named: str
) -> None:
    path = f"{RESPONSES}/{made(http, 'Hello')}/input_items{query}"
    answer = http.get(path)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, named)
    path = f"{RESPONSES}/{made(strict, 'Hello')}/input_items{query}"
    refused = strict.get(path)
    first = named.split(", ")[0][1:]
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, first)
    assert error["message"].startswith(f"unknown parameter {first} in the address")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_each_path_names_unknown_parameters_of_the_address(
    http: TestClient, strict: TestClient, path: str
) -> None:
    body = {**BASES[path], "stream": False}
    assert http.post(f"{path}?zz=1", json=body).headers[HEADER] == "?zz"
    assert strict.post(f"{path}?zz=1", json=body).status_code == 400


def test_anthropics_client_marks_its_beta_paths(http: TestClient, strict: TestClient) -> None:
    for client in (http, strict):
        answer = client.post("/v1/messages?beta=true", json=BASES["/v1/messages"])
        assert (answer.status_code, answer.headers.get(HEADER)) == (200, None)


def test_a_parameter_of_the_address_is_given_once(http: TestClient) -> None:
    answer = http.get(f"{RESPONSES}/{made(http, 'Hello')}/input_items?limit=1&limit=2")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "limit")
    assert error["message"] == "the address has limit 2 times: give it once"
