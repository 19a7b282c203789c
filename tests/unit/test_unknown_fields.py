"""Unknown fields are ignored and named, unless the server is strict (`--strict-fields`)."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from nearfar.cli import serve as command
from nearfar.fallback_server.engines.base import EngineRequest, Prepared
from nearfar.fallback_server.engines.relay import upstream_body
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.hosts import check_origin
from tests.support.commands import nearfar
from tests.unit.test_server_requests import MODEL, EchoEngine

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HEADER = "x-nearfar-ignored"


class Noting(EchoEngine):
    """Keeps the requests that reached the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[EngineRequest] = []

    async def prepare(self, request: EngineRequest) -> Prepared:
        self.asked.append(request)
        return await super().prepare(request)


@pytest.fixture
def engine() -> Noting:
    return Noting()


@pytest.fixture
def http(engine: Noting) -> TestClient:
    return TestClient(create_app(engine), raise_server_exceptions=False)


def ask(http: TestClient, agent: str = "tests/1", **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO, **more}
    made: Any = http.post(CHAT, json=body, headers={"User-Agent": agent})
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"repeat_penalty": 1.1, "options": {"num_ctx": 1}}, "repeat_penalty, options"),
        ({"cache_prompt": True, "n_predict": 8, "intent": True}, "cache_prompt, n_predict, intent"),
        ({"user": {"name": "Ann", "id": "1"}}, "user"),  # sent by Open WebUI
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),  # sent by Continue
        ({"metadata": {"chat": {"id": 1}}, "store": "yes"}, "metadata, store"),
        ({"messages": [{**HELLO[0], "id": "m1"}, {**HELLO[0], "id": "m2"}]}, "messages.id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "index": 0}]}]},
            "messages.content.index",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "meta": 1}}]}, "tools.function.meta"),
        ({"stream": True, "stream_options": {"include_usage": True, "more": 1}}, "stream_options.more"),
    ],
)
def test_what_is_not_known_is_ignored_and_named(http: TestClient, fields: dict[str, Any], named: str) -> None:
    made = ask(http, **fields)
    assert made.status_code == 200, made.text
    assert made.headers[HEADER] == named


def test_nothing_ignored_says_nothing(http: TestClient) -> None:
    made = ask(http, user="Ann", temperature=0.5)
    assert (made.status_code, HEADER in made.headers) == (200, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"functions": [{"name": "f"}]}, "functions"),  # the model would not see the functions
        ({"stop": 3, "repeat_penalty": 1}, "stop"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"web_search_options": {}}, "web_search_options"),
        # the known part of the record asks for nothing
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs"),
    ],
)
def test_a_wrong_value_of_a_known_field_is_still_refused(
    http: TestClient, fields: dict[str, Any], param: str
) -> None:
    made = ask(http, **fields)
    assert (made.status_code, made.json()["error"]["param"]) == (400, param), made.text


def test_completions_and_embeddings_ignore_too(http: TestClient) -> None:
    for path, body in (
        (TEXT, {"prompt": "x", "repeat_penalty": 1, "user": {}}),
        (VECTORS, {"input": "x", "repeat_penalty": 1, "user": {}}),
    ):
        made = http.post(path, json={"model": MODEL, **body})
        assert made.status_code == 200, made.text
        assert sorted(made.headers[HEADER].split(", ")) == ["repeat_penalty", "user"]
    assert http.post(TEXT, json={"model": MODEL, "prompt": "x", "suffix": "y"}).status_code == 400


def test_a_front_hands_on_nothing_that_it_ignored(http: TestClient, engine: Noting) -> None:
    ask(http, repeat_penalty=1, user={"id": 1}, temperature=0.5, messages=[{**HELLO[0], "id": "m"}])
    handed_on = upstream_body(engine.asked[-1], ROUTE)
    assert handed_on == {"model": "there", "messages": HELLO, "temperature": 0.5}


ROUTE: Any = SimpleNamespace(model="there", salts=False, priorities=False)
IMAGE = [
    {"type": "text", "text": "What is it?"},
    {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}},
]
UNKNOWN: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": IMAGE, "x": 1},
        {"role": "assistant", "content": None, "reasoning_details": [{}]},
    ],
    "bad_words": ["no"], "mm_processor_kwargs": {"fps": None}, "temperature": 0.5,
}  # fmt: skip


def test_what_only_an_upstream_knows_is_passed_on(engine: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noting, "passes_on", True)
    http = TestClient(create_app(engine), raise_server_exceptions=False)
    idle = {"modalities": ["text"], "seed": None, "user": "Ann", "kv_transfer_params": {"remote_host": "a"}}
    made = ask(http, **UNKNOWN, **idle)
    assert (made.status_code, HEADER in made.headers) == (200, False), made.text
    sent = upstream_body(engine.asked[-1], ROUTE)
    first, second = UNKNOWN["messages"]
    told = [first, {name: value for name, value in second.items() if value is not None}]
    assert sent == {**UNKNOWN, "messages": told, "model": "there"}
    assert ask(http, temperature="hot").status_code == 400
    assert engine.asked[-1].messages[0]["content"] == ["What is it?", {"type": "image_url"}]


def test_a_strict_front_passes_on_values_that_only_an_upstream_follows(
    engine: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Noting, "passes_on", True)
    http = TestClient(create_app(engine, AppOptions(strict_fields=True)), raise_server_exceptions=False)
    made = ask(http, messages=[{"role": "user", "content": IMAGE}], bad_words=["no"])
    assert (made.status_code, HEADER in made.headers) == (200, False), made.text
    sent = upstream_body(engine.asked[-1], ROUTE)
    assert (sent["messages"][0]["content"], sent["bad_words"]) == (IMAGE, ["no"])
    refused = ask(http, mirostat=2)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mirostat")


def test_the_log_names_a_field_once_for_each_kind_of_client(
    http: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            for agent in ("OpenAI/Python 2.8.1", "OpenAI/Python 2.9.0", "Go-http-client/1.1"):
                ask(http, agent, repeat_penalty=1, mirostat=2)
    told = [record.__dict__["fields"] for record in caplog.records if "ignored" in record.getMessage()]
    assert told == [
        {"field": field, "client": client}
        for client in ("OpenAI/Python", "Go-http-client")
        for field in ("repeat_penalty", "mirostat")
    ]


def test_strangers_names_can_do_nothing_to_header_and_log(
    http: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    strange = {"a\r\nset-cookie: x": 1, "ü": 1, "a, b": 1, "": 1, "x" * 5000: 1}
    named = ask(http, **strange).headers[HEADER]
    assert named.isascii()
    assert "'a\\r\\nset-cookie: x'" in named
    assert len(named) < 400
    many = {f"{number}-{'y' * 90}": 1 for number in range(3000)}
    assert ask(http, **many).headers[HEADER].endswith(", and 2984 more")
    assert len(ask(http, **many).headers[HEADER]) < 1500
    with caplog.at_level(logging.INFO):
        caplog.clear()
        for number in range(300):
            ask(http, f"{'z' * 200}{number}", **{f"f{number}-{field}": 1 for field in range(16)})
    lines = [record for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) <= 1024
    assert max(len(str(record.__dict__["fields"])) for record in lines) < 200


def test_a_strict_server_refuses(engine: Noting) -> None:
    http = TestClient(create_app(engine, AppOptions(strict_fields=True)), raise_server_exceptions=False)
    assert ask(http, repeat_penalty=1).status_code == ask(http, user={"id": 1}).status_code == 400


@pytest.mark.parametrize("strict", [False, True])
def test_the_command_line_says_which(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    given: list[Any] = []
    monkeypatch.setattr(command, "run", lambda models, options, tell: given.append(options))
    done = nearfar("serve", "http://127.0.0.1:9", *(("--strict-fields",) if strict else ()))
    assert (done.returncode, done.stderr) == (0, "")
    assert given[0].strict_fields is strict


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--log-level", "loud", "--log-level must be debug, info, warning, error, not 'loud'"),
        ("--drain", "-5", "--drain must be 0 or more seconds, not -5"),
        ("--max-body", "0", "--max-body must be at least 1, not 0"),
        ("--replicas", "3", "--replicas 3 needs --ray"),
        ("--cors", "notanorigin", "--cors takes an origin as browsers send it"),
        ("--cors", "https://app.example/", "not 'https://app.example/'"),
        ("--cors", "https://app.example:443", "not 'https://app.example:443'"),
    ],
)
def test_the_command_line_refuses_what_no_server_can_do(option: str, value: str, said: str) -> None:
    done = nearfar("serve", "http://127.0.0.1:9", option, value)
    assert done.returncode == 1
    assert said in done.stderr


def test_pages_of_other_origins_may_read_what_was_ignored(engine: Noting) -> None:
    options = AppOptions(cors=("https://app.example",))
    http = TestClient(create_app(engine, options))
    body = json.dumps({"model": MODEL, "messages": HELLO, "intent": 1})
    headers = {"Origin": "https://app.example", "Content-Type": "application/json"}
    made = http.post(CHAT, content=body, headers=headers)
    assert HEADER in made.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin", ["*", "null", "https://a-b.example", "http://[::1]:3000", "tauri://localhost"]
)
def test_what_browsers_send_is_an_origin(origin: str) -> None:
    check_origin(origin)
