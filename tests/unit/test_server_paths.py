"""Keys, models, limits and shapes of errors hold on every path that takes a request, here and in front of
another server.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from nearfar.fallback_server.engines.base import ModelInfo
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.fallback_server.http.passing import FORMS, FREE
from nearfar.remote.server import NATIVE
from tests.support.bodies import BASES
from tests.support.clouds import Cloud, described, listing, reply
from tests.support.fronts import opened_fronts
from tests.support.servers import RunningServer
from tests.unit.test_server_requests import MODEL, EchoEngine

HERE = [path for path in BASES if path not in ("/v1/detokenize", "/api/show")]
"""Paths of prompts."""
BEHIND = [path for path in NATIVE if path not in FORMS]


@pytest.fixture
def keys(tmp_path: Path) -> AppOptions:
    """Keys without limits, for another model, of few requests, and of few tokens."""
    limits: dict[str, dict[str, Any]] = {
        "alice": {}, "bob": {"models": ("other",)}, "carol": {"requests_per_minute": 1},
        "dave": {"tokens_per_minute": 2}, "erin": {"tokens_per_day": 2},
    }  # fmt: skip
    for name, more in limits.items():
        add_key(tmp_path / "keys.toml", Key(name, hashed(name), **more))
    return AppOptions(keys=KeyStore(tmp_path / "keys.toml"))


@pytest.fixture
def here(keys: AppOptions) -> httpx.Client:
    return TestClient(create_app(EchoEngine(), keys), raise_server_exceptions=False)  # type: ignore[return-value]


@pytest.fixture
def front(keys: AppOptions) -> Iterator[httpx.Client]:
    """A front of a server that lists every path."""

    def answer(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        if path == "/v1/models":
            yield listing(MODEL)
        elif path == "/openapi.json":
            yield reply("200 OK", described({name: ["model", "cache_salt"] for name in NATIVE}))
        else:
            yield reply("200 OK", {"model": MODEL, "usage": {"input_tokens": 2, "output_tokens": 3}})

    with Cloud(answer) as cloud, opened_fronts() as fronts:
        yield fronts(cloud, app=keys)[1]


def said(path: str, response: httpx.Response) -> str:
    """The message of an error, in the shape of the path's API."""
    record = response.json()
    if path.startswith("/api/"):
        return str(record["error"])
    if path.startswith("/v1/messages"):
        assert record["type"] == "error"
    return str(record["error"]["message"])


def holds(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Each key may do what it may do."""

    def answered(key: str | None) -> httpx.Response:
        headers = {} if key is None else {"x-api-key": key}
        response = http.post(path, json={"model": MODEL, **body}, headers=headers)
        if response.status_code >= 400:
            assert said(path, response)
        return response

    def statuses(*asked: str | None) -> list[int]:
        return [answered(key).status_code for key in asked]

    assert statuses(None, "nobody", "bob", "alice") == [401, 401, 404, 200]
    assert statuses("carol", "carol") == [200, 429]
    if path not in FREE:
        assert {*statuses("dave", "erin")} == {400}  # more tokens than they ever have


@pytest.mark.parametrize("path", HERE)
def test_keys_and_limits_hold(here: httpx.Client, path: str) -> None:
    holds(here, path, BASES[path])


@pytest.mark.parametrize("path", BEHIND)
def test_keys_and_limits_hold_in_front(front: httpx.Client, path: str) -> None:
    holds(front, path, {**BASES.get(path, {}), "input": "Hello, you there", "store": False})


class Renamed(EchoEngine):
    """One model with two names."""

    def models(self) -> tuple[ModelInfo, ...]:
        return ModelInfo("first", 100), ModelInfo("second", 100)


@pytest.mark.parametrize("path", [path for path in BASES if path != "/v1/detokenize"])
def test_a_request_without_a_model_is_for_the_first_name_of_the_only_one(path: str) -> None:
    http = TestClient(create_app(Renamed()), raise_server_exceptions=False)
    assert http.post(path, json=BASES[path]).status_code == 200
    if path == "/v1/chat/completions":
        assert http.post(path, json=BASES[path]).json()["model"] == "first"


def test_a_front_of_several_models_needs_a_name() -> None:
    engine = Renamed()
    engine.passes_on = True
    http = TestClient(create_app(engine), raise_server_exceptions=False)
    refused = http.post("/v1/chat/completions", json=BASES["/v1/chat/completions"])
    assert refused.status_code == 400
    assert "this server has first, second: name one" in refused.text


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that takes bodies of 1 MiB."""
    folder = tmp_path_factory.mktemp("small")
    add_key(folder / "keys.toml", Key("alice", hashed("alice")))
    options = AppOptions(ServerLimits(body_bytes=1 << 20), KeyStore(folder / "keys.toml"))

    async def made() -> EchoEngine:
        return EchoEngine()

    server = RunningServer(made, options)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("key", "chunked", "status"), [("alice", False, 413), ("alice", True, 413), ("nobody", True, 401)]
)
def test_a_client_that_still_sends_gets_the_answer(
    small: RunningServer, key: str, chunked: bool, status: int
) -> None:
    # http.client writes all before it reads, as many clients do: a reset would hide the answer.
    http = HTTPConnection("127.0.0.1", small.port, timeout=30)
    data = [b"x" * (1 << 16)] * 64
    headers = {"x-api-key": key, "Content-Type": "application/json"}
    if not chunked:
        headers["Content-Length"] = str(64 << 16)
    http.request("POST", "/v1/completions", iter(data), headers, encode_chunked=chunked)
    answer = http.getresponse()
    assert answer.status == status
    assert json.loads(answer.read())["error"]["message"]
    http.close()


def test_a_client_that_sends_without_end_is_cut(small: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", small.port), 20) as connection:
        connection.sendall(head)
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * (64 << 20))


def test_the_description_lists_errors_of_every_path() -> None:
    for path, ways in create_app(EchoEngine()).openapi()["paths"].items():
        for way, operation in ways.items():
            assert {"4XX", "5XX"} <= operation["responses"].keys(), (way, path)


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("/v1/chat/completions", {"text/event-stream", "application/json"}),
        ("/v1/completions", {"text/event-stream", "application/json"}),
        ("/v1/responses", {"text/event-stream", "application/json"}),
        ("/v1/messages", {"text/event-stream", "application/json"}),
        ("/api/chat", {"application/x-ndjson", "application/json"}),
        ("/api/generate", {"application/x-ndjson", "application/json"}),
        ("/metrics", {"text/plain"}),
        ("/v1/embeddings", {"application/json"}),
    ],
)
def test_the_description_lists_the_types_of_answers(path: str, kinds: set[str]) -> None:
    (operation,) = create_app(EchoEngine()).openapi()["paths"][path].values()
    assert operation["responses"]["200"]["content"].keys() == kinds
