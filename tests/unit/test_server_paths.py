"""Keys, models, limits and shapes of errors hold on every path that takes a request, here and in front of
another server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from nearfar.fallback_server.engines.base import ModelInfo
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.fallback_server.http.passing import FORMS
from nearfar.remote.server import NATIVE
from tests.support.bodies import BASES
from tests.support.clouds import Cloud, described, listing, reply
from tests.support.fronts import opened_fronts
from tests.unit.test_server_requests import MODEL, EchoEngine

HERE = [path for path in BASES if path not in ("/v1/detokenize", "/api/show")]
"""Paths of prompts."""
COUNTING = ("/v1/messages/count_tokens", "/v1/tokenize")
"""Paths that count tokens and compute none, so that a request costs a key none."""
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
    if path not in COUNTING:
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
