"""What every engine refuses of a chat request, and takes: by the vectors that the web engine passes too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from nearfar.edge_runtime.openai.parameters import (
    chat_sampling,
    check_model,
    checked_messages,
    choices,
    continues_last,
    include_usage,
    streams,
    tools_and_choice,
)
from nearfar.errors import RequestError
from nearfar.fallback_server.http.app import create_app
from tests import vectors
from tests.unit.test_server_requests import MODEL, EchoEngine

VECTORS = json.loads(Path(vectors.__file__).with_name("requests").joinpath("chat.json").read_text())
REFUSED = [(one["param"], one["request"]) for one in VECTORS["refused"]]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def http() -> TestClient:
    return TestClient(create_app(EchoEngine()), raise_server_exceptions=False)


def on_device(request: dict[str, Any]) -> None:
    """The checks of a chat request, in the engine's order; `stream` is an argument beside them."""
    params = cast(Any, {name: value for name, value in request.items() if name not in ("messages", "stream")})
    streams(request.get("stream"))
    chat_sampling(params)
    choices(params)
    include_usage(params)
    tools_and_choice(params)
    check_model(params, "sample")
    continues_last(params, checked_messages(request.get("messages", HELLO)))


@pytest.mark.parametrize(("param", "request_"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_refused_by_name(http: TestClient, param: str, request_: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        on_device(request_)
    assert refusal.value.param == param
    answer: Any = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, **request_})
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("request_", VECTORS["taken"], ids=lambda value: json.dumps(value)[:60])
def test_taken(http: TestClient, request_: dict[str, Any]) -> None:
    on_device(request_)
    answer: Any = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, **request_})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("given", "param"), [({"model": "another"}, "model"), ({"model": 5}, "model")])
def test_only_the_loaded_model_is_taken(given: dict[str, Any], param: str) -> None:
    on_device({"model": "sample"})
    with pytest.raises(RequestError) as refusal:
        on_device(given)
    assert refusal.value.param == param
