"""Every request gets an answer with one of the API's own statuses: properties, and the app's own OpenAPI
description.
"""

from __future__ import annotations

import base64
import gzip
import json
import struct
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.errors import EngineError, OverloadError, RequestError
from nearfar.fallback_server.backend import BackendStats
from nearfar.fallback_server.engines.base import (
    GENERATES_NOTHING,
    EmbeddingVectors,
    EngineRequest,
    ModelInfo,
    Prepared,
    Scores,
    TokenUsage,
    Unready,
)
from nearfar.fallback_server.http import convert
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.paths import OLLAMA_PATHS, PATHS
from nearfar.fallback_server.http.schemas import ChatRequest, CompletionRequest

MODEL = "echo"


class EchoAnswers:
    """Answers with the prompt's length, once for each choice."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self.closed = 0

    ignored = ""

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        request = self._prepared.request
        for index in range(request.choices):
            yield Piece(index, str(self._prepared.prompt_tokens), tokens=1)
            if "fail later" in str(request.messages):
                raise EngineError("it died")
            yield Piece(index, finish="stop")

    async def aclose(self) -> None:
        self.closed += 1

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(self._prepared.prompt_tokens, self._prepared.request.choices)


class EchoEngine:
    """A fast engine that follows instructions in a message."""

    generates = True
    passes_on = False

    def __init__(self) -> None:
        self.made: list[EchoAnswers] = []

    def models(self) -> tuple[ModelInfo, ...]:
        return (ModelInfo(MODEL, 100),)

    async def prepare(self, request: EngineRequest) -> Prepared:
        text = str(request.messages)
        if "refuse" in text:
            raise RequestError("refused", "messages")
        if "overload" in text:
            raise OverloadError("busy", 7)
        if "bug" in text:
            raise ZeroDivisionError("secret detail")
        return Prepared(request, ((1, 2, 3, 4, 5),), 5)

    async def submit(self, prepared: Prepared) -> EchoAnswers:
        self.made.append(EchoAnswers(prepared))
        return self.made[-1]

    async def cancel(self, request_id: str) -> None:
        pass

    async def embed(self, prepared: Prepared) -> EmbeddingVectors:
        inputs = prepared.request.prompts
        return EmbeddingVectors([np.array([0.5, len(item)], np.float32) for item in inputs], len(inputs))

    async def score(self, prepared: Prepared) -> Scores:
        questions = prepared.request.questions
        labels = [[(at,) for at in range(len(each.labels))] for each in questions]
        return Scores([[(-1.0,) for _ in each] for each in labels], labels, len(questions))

    async def text_of(self, tokens: Sequence[int]) -> str:
        return "x" * len(tokens)

    async def names_of(self, tokens: Sequence[int]) -> list[str]:
        return ["x" for _ in tokens]

    def stats(self) -> BackendStats:
        return BackendStats(0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0)

    async def ready(self) -> bool:
        return self.generates

    def unready(self) -> Unready:
        return GENERATES_NOTHING

    async def close(self, drain: float = 0.0) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture(scope="module")
def app(engine: EchoEngine) -> FastAPI:
    return create_app(engine, AppOptions(strict_fields=True))


@pytest.fixture(scope="module")
def http(app: FastAPI) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


def ask(http: TestClient, text: str = "x", **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}
    response: Any = http.post("/v1/chat/completions", json=body)
    return response  # type: ignore[no-any-return]


def test_errors_of_engines_have_their_statuses(http: TestClient, engine: EchoEngine) -> None:
    assert ask(http).json()["choices"][0]["message"]["content"] == "5"
    assert (ask(http, "refuse").status_code, ask(http, "refuse").json()["error"]["param"]) == (
        400,
        "messages",
    )
    overload = ask(http, "overload", stream=True)
    assert (overload.status_code, overload.headers["retry-after"]) == (429, "7")
    bug = ask(http, "bug")
    assert bug.status_code == 500
    assert "secret" not in bug.text
    assert ask(http, "fail later").status_code == 503
    late = ask(http, "fail later", stream=True)
    assert late.status_code == 200
    assert '"type": "server_error"' in late.text
    assert "[DONE]" not in late.text
    assert all(answers.closed == 1 for answers in engine.made)


def test_ready_says_why_not(http: TestClient, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (http.get("/ready").status_code, http.get("/ready").json()) == (200, {"status": "ready"})
    monkeypatch.setattr(engine, "generates", False)
    told = http.get("/ready")
    assert (told.status_code, told.json()["status"]) == (503, "not ready: no token generated recently")


def test_embeddings(http: TestClient) -> None:
    made: Any = http.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "bc"]})
    assert [item["embedding"] for item in made.json()["data"]] == [
        pytest.approx([0.5 / 1.25**0.5, 1 / 1.25**0.5]), pytest.approx([0.5 / 4.25**0.5, 2 / 4.25**0.5]),
    ]  # fmt: skip
    coded: Any = http.post("/v1/embeddings", json={"model": MODEL, "input": "a", "encoding_format": "base64"})
    written = base64.b64decode(coded.json()["data"][0]["embedding"])
    assert written == struct.pack("<2f", 0.5 / 1.25**0.5, 1 / 1.25**0.5)
    wide = http.post("/v1/embeddings", json={"model": MODEL, "input": "a", "dimensions": 3})
    assert (wide.status_code, wide.json()["error"]["param"]) == (400, "dimensions")
    cut = http.post("/v1/embeddings", json={"model": MODEL, "input": ["a"] * 1000, "dimensions": 1})
    # LangChain sends up to 1,000 texts in a request
    assert [one["embedding"] for one in cut.json()["data"]] == [[1.0]] * 1000


def test_the_place_of_a_mistake_is_named(http: TestClient) -> None:
    def message(**body: Any) -> tuple[str, str | None]:
        error = ask(http, **body).json()["error"]
        return error["message"], error["param"]

    text, param = message(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
    )
    assert "reads no images" in text
    assert param == "messages"
    assert message(n=1000)[1] == "n"
    assert "1000" in message(n=1000)[0]
    assert message(colour="red") == ("unknown field colour; leave it out", "colour")
    assert message(max_token=3)[0] == "unknown field max_token: did you mean max_tokens?"
    assert "tool_choice needs tools" in message(tool_choice="required")[0]
    for name in ("body", "str", "tool", "[2J", "a[b]", "messages[0]"):  # named like types of a place
        assert message(**{name: 1})[0].startswith(f"unknown field {name}"), name
        assert message(**{name: 1})[1] == name
    for name, quoted in (("", "''"), ("\x1b[2J", r"'\u001b[2J'")):
        assert message(**{name: 1}) == (f"unknown field {quoted}; leave it out", name)
    assert "unknown field" in message(messages=[{"role": "user", "content": "a", "str": 1}])[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"messages": [{"role": "user", "content": "a", "id": "1"}]},
            "unknown field messages.0.id; there are ",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_call": []}]},
            "unknown field messages.0.tool_call: did you mean tool_calls?",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            'response_format.schema: this server takes only null here; write type "json_schema"',
        ),
        (
            {"response_format": {"type": "text", "jsonschema": {}}},
            "unknown field response_format.jsonschema: did you mean json_schema?",
        ),
        ({"stream_options": {"stream": True}}, "unknown field stream_options.stream; there are "),
    ],
)  # fmt: skip
def test_a_nested_field_is_told_with_one_of_the_same_object(
    http: TestClient, fields: dict[str, Any], said: str
) -> None:
    assert ask(http, **fields).json()["error"]["message"].startswith(said)


KIND = {"Content-Type": "application/json"}


def test_a_body_that_is_compressed_is_refused_by_that_and_a_byte_order_mark_is_passed_over(
    http: TestClient,
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    url = "/v1/completions"
    assert http.post(url, content=b"\xef\xbb\xbf" + body, headers=KIND).status_code == 200
    packed = http.post(url, content=gzip.compress(body), headers={**KIND, "Content-Encoding": "gzip"})
    assert packed.status_code == 415
    assert "Content-Encoding: gzip" in packed.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{MODEL}"])
def test_head_is_answered_where_get_is(http: TestClient, path: str) -> None:
    assert http.head(path).status_code == http.get(path).status_code == 200


@pytest.mark.parametrize("field", ["intent", "options", "allowed_openai_params", "n_predict", "cache_prompt"])
def test_a_field_of_another_api_is_not_told_with_one_that_looks_like_it(http: TestClient, field: str) -> None:
    assert ask(http, **{field: 1}).json()["error"]["message"] == f"unknown field {field}; leave it out"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("prediction", {}, "prediction: this changes nothing here; leave the field out"),
        ("functions", [{"name": "f"}], "functions: this server takes only null here; use tools"),
        ("function_call", "auto", "function_call: this server takes only null here; use tool_choice"),
        ("prompt_logprobs", -1, "prompt_logprobs: this must be at least 0, not -1"),
        ("stream", "yes", "stream: this must be true or false, not 'yes'"),
        ("tools", {}, "tools: this must be a list"),
        ("messages", "Hello", "messages: this must be a list, not 'Hello'"),
        ("logit_bias", [1], "logit_bias: this must be an object"),
        ("logit_bias", {"a": 1}, "logit_bias: 'a' is not a token id"),
        ("logit_bias", {"a": 1, "5": 1, "b": 1}, "logit_bias: 'a', 'b' are not token ids"),
        ("response_format", "json", "response_format: this must be an object, not 'json'"),
        ("temperature", "hot", "temperature: this must be a number, not 'hot'"),
        ("seed", 1.5, "seed: this must be a whole number, not 1.5"),
        ("n", 0, "n: this must be at least 1, not 0"),
        ("top_p", 2, "top_p: this must be at most 1, not 2"),
        ("top_p", 0, "top_p: this must be more than 0, not 0"),
        ("user", {"id": 1}, "user: this must be a string"),
        ("user", "x" * 600, "user: this must have at most 512 characters"),
        ("tool_choice", "maybe", "tool_choice: this must be 'none', 'auto' or 'required' or an object"),
    ],
)  # fmt: skip
def test_what_a_field_must_be_is_said_in_words_of_json(
    http: TestClient, field: str, value: Any, said: str
) -> None:
    told = ask(http, **{field: value}).json()["error"]
    assert (told["message"][: len(said)], told["param"]) == (said, field)
    for word in ("Input", "None", "dictionary", "pydantic"):
        assert word not in told["message"]


def test_what_a_message_must_be_is_said_in_words_of_json(http: TestClient) -> None:
    for message, said in (
        ({"role": "user"}, "messages.0.content: this field is missing"),
        ({"role": 5, "content": "x"}, "messages.0.role: this must be a string, not 5"),
        ({"role": "function", "content": 5}, "messages.0.content: this must be a string or a list of parts"),
        ({"content": "x"}, "messages.0.role: this field is missing"),
        ("hello", "messages.0: this must be an object, not 'hello'"),
        ({"role": "assistant", "content": "x", "function_call": {}}, "messages.0.function_call: this server"),
    ):  # fmt: skip
        told = ask(http, messages=[message]).json()["error"]["message"]
        assert told.startswith(said), told


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5),
    st.sampled_from(["chat/completions", "completions"]),
)
def test_any_json_gets_an_answer_of_the_api(http: TestClient, fields: dict[str, Any], path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path.startswith("chat") else {"prompt": "x"}
    content = json.dumps({"model": MODEL, **prompt, **fields})
    response = http.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert set(error) == {"message", "type", "param", "code"}


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u019d8x ', max_size=60).map(str.encode))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_get_an_answer_of_the_api(http: TestClient, data: bytes) -> None:
    response = http.post("/v1/chat/completions", content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 10**6),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.text(min_size=1, max_size=8) | st.lists(st.text(min_size=1, max_size=8), max_size=4),
        "logit_bias": st.dictionaries(st.integers(0, 10**6).map(str), st.floats(-100, 100), max_size=4),
        "max_tokens": st.integers(1, 10**6),
        "n": st.integers(1, 4),
        "priority": st.integers(-5, 5),
    },
)


@settings(max_examples=80, deadline=None)
@given(SAMPLING)
def test_what_is_valid_reaches_the_engine_as_it_was_meant(fields: dict[str, Any]) -> None:
    made = convert.completion(CompletionRequest.model_validate({"model": MODEL, "prompt": "x", **fields}))
    sampling = made.sampling
    assert sampling.get("temperature") == fields.get("temperature")
    assert sampling.get("top_k") == (max(fields["top_k"], 0) if "top_k" in fields else None)
    bias = {int(key): value for key, value in fields.get("logit_bias", {}).items()}
    assert sampling.get("logit_bias", {}) == bias
    assert 0 <= sampling.get("seed", 0) < 2**64
    stop = fields.get("stop", [])
    assert made.stop == ((stop,) if isinstance(stop, str) else tuple(stop))
    assert (made.n, made.priority, made.max_tokens) == (
        fields.get("n", 1), fields.get("priority", 0), fields.get("max_tokens", 16)
    )  # fmt: skip


@pytest.fixture
def openapi() -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(EchoEngine()))


# The schema comes from a fixture: otherwise Schemathesis makes all cases when it collects the test, which
# takes 4 CPU seconds in each process.
schema = schemathesis.pytest.from_fixture("openapi")


@schema.include(path_regex="^/v1").parametrize()
@settings(
    max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip
def test_the_app_keeps_to_its_own_openapi(case: Any) -> None:
    """Only statuses of the API, and errors in its shape, for every request that the schema allows."""
    response = case.call()
    assert response.status_code in (200, 400, 404, 405)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error if case.path.startswith("/api/") else error["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completion", "/v1/chat/completions"),
        ("/v1/response", "/v1/responses"),
        ("/v1/moderations", None),
        ("/api/push", None),
        ("/x", None),
    ],
)
def test_a_path_that_is_none_is_told_with_the_one_that_is_meant(
    http: TestClient, path: str, meant: str | None
) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    told = error if path.startswith("/api/") else error["message"]
    known = OLLAMA_PATHS if path.startswith("/api/") else PATHS
    there = f"this server speaks {', '.join(known[:-1])} and {known[-1]}"
    assert told == f"there is no {path} here: " + (f"did you mean {meant}?" if meant else there)


def test_a_method_that_a_path_does_not_take_is_told_with_the_one_that_it_takes(http: TestClient) -> None:
    answer = http.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == (
        "/v1/chat/completions takes POST, not GET",
        "method_not_allowed",
    )


def test_two_tools_of_a_name_are_told_in_one_sentence(http: TestClient) -> None:
    tool = {"type": "function", "function": {"name": "w"}}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool, tool]}
    told = http.post("/v1/chat/completions", json=asked).json()["error"]["message"]
    assert told == "tools: there are two of the name 'w': give each its own"


def test_paths_that_may_be_meant_are_those_that_there_are() -> None:
    paths = create_app(EchoEngine()).openapi()["paths"]
    inner = {"/v1/responses/input_tokens", "/v1/messages/count_tokens"}
    assert {*PATHS, *OLLAMA_PATHS} | inner == {
        path for path in paths if path.startswith(("/v1/", "/api/")) and "{" not in path
    }
