"""The requests that every engine accepts and rejects, by the vectors that the web engine also passes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from nearfar.edge_runtime.openai.messages import checked_messages
from nearfar.edge_runtime.openai.parameters import (
    asked_grammar,
    chat_sampling,
    check_model,
    choices,
    completion_sampling,
    continues_last,
    include_usage,
    streams,
    template_variables,
    token_prompt,
    tools_and_choice,
)
from nearfar.edge_runtime.tools.parameters import check_schemas
from nearfar.errors import RequestError
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.convert import chat, completion
from nearfar.fallback_server.http.schemas import ChatRequest, CompletionRequest
from nearfar.format.requests import MAX_SCHEMAS_BYTES, MAX_TOOLS, MAX_TOOLS_BYTES
from tests import vectors
from tests.support.servers import MODEL as SERVED
from tests.support.servers import tiny_engine
from tests.unit.test_server_requests import MODEL, EchoEngine

FOLDER = Path(vectors.__file__).with_name("requests")
VECTORS = {kind: json.loads((FOLDER / f"{kind}.json").read_text()) for kind in ("chat", "completions")}
REFUSED = [
    (kind, one["param"], one.get("says", ""), one["request"])
    for kind, both in VECTORS.items()
    for one in both["refused"]
]
TAKEN = [(kind, request) for kind, both in VECTORS.items() for request in both["taken"]]
MESSAGES = json.loads((FOLDER / "messages.json").read_text())["cases"]
LIMITS = json.loads((FOLDER.with_name("tools") / "limits.json").read_text(encoding="utf-8"))
ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def http() -> TestClient:
    return TestClient(create_app(EchoEngine(), AppOptions(strict_fields=True)), raise_server_exceptions=False)


def chat_on_device(request: dict[str, Any]) -> None:
    """Check a chat request in the engine's order; `stream` is a separate argument."""
    params = cast(Any, {name: value for name, value in request.items() if name not in ("messages", "stream")})
    streams(request.get("stream"))
    chat_sampling(params)
    choices(params)
    include_usage(params)
    asked_grammar(params)
    tools_and_choice(params)
    template_variables(params)
    check_model(params, "sample")
    continues_last(params, checked_messages(request.get("messages", HELLO)))


def text_on_device(request: dict[str, Any]) -> None:
    """Check a plain request in the engine's order."""
    params = cast(Any, {name: value for name, value in request.items() if name not in ("prompt", "stream")})
    streams(request.get("stream"))
    completion_sampling(params)
    choices(params)
    include_usage(params)
    asked_grammar(params)
    check_model(params, "sample")
    prompt = request.get("prompt", "Hello")
    assert isinstance(prompt, str) or token_prompt(prompt)


CHECKS = {"chat": chat_on_device, "completions": text_on_device}


def ask(http: TestClient, kind: str, request: dict[str, Any]) -> Any:
    start = {"messages": HELLO} if kind == "chat" else {"prompt": "Hello"}
    return http.post(ROUTES[kind], json={"model": MODEL, **start, **request})


@pytest.mark.parametrize(
    ("kind", "param", "says", "request_"), REFUSED, ids=lambda value: json.dumps(value)[:60]
)
def test_refused_by_name(
    http: TestClient, kind: str, param: str, says: str, request_: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as refusal:
        CHECKS[kind](request_)
    assert refusal.value.param == param
    assert says in str(refusal.value)
    answer = ask(http, kind, request_)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["param"] == param
    # The server's errors begin with the place, and have dots in it.
    placed = re.sub(r"\[(\d+)\]", r".\1", says).replace(" must be", ": this must be")
    assert {says, placed} & {part for part in (says, placed) if part in answer.json()["error"]["message"]}


async def test_refused_on_devices_and_answered_by_a_server(tmp_path: Path) -> None:
    engine = await tiny_engine(tmp_path)
    try:
        for one in VECTORS["completions"]["refused_on_devices"]:
            with pytest.raises(RequestError) as refusal:
                text_on_device(one["request"])
            assert refusal.value.param == one["param"]
            asked = completion(CompletionRequest(model=SERVED, prompt="Hello", **one["request"]))
            answers = await engine.submit(await engine.prepare(asked))
            pieces = [piece async for piece in answers.pieces()]
            assert pieces[0].logprobs
    finally:
        await engine.close()


@pytest.mark.parametrize(("kind", "request_"), TAKEN, ids=lambda value: json.dumps(value)[:60])
def test_taken(http: TestClient, kind: str, request_: dict[str, Any]) -> None:
    CHECKS[kind](request_)
    answer = ask(http, kind, request_)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("case", MESSAGES, ids=lambda case: case["name"])
def test_messages_become_the_same_on_all_surfaces(http: TestClient, case: dict[str, Any]) -> None:
    assert checked_messages(case["messages"]) == case["told"]
    body = ChatRequest.model_validate({"model": MODEL, "messages": case["messages"]})
    assert list(chat(body).messages) == case["told"]
    assert ask(http, "chat", {"messages": case["messages"]}).status_code == 200


def filled(count: int, fill: dict[str, Any], where: str) -> dict[str, Any]:
    """The tool with `count` bytes of a text in its description or in the name of a property."""
    whole, rest = divmod(count, fill["bytes"])
    tool = copy.deepcopy(LIMITS["tool"])
    text = fill["text"] * whole + "a" * rest
    if where == "description":
        tool["function"]["description"] = text
    else:
        # the limit of schemas does not count descriptions
        tool["function"]["parameters"]["properties"] = {text: {"description": "a" * MAX_SCHEMAS_BYTES}}
    return tool


@pytest.mark.parametrize("fill", LIMITS["fills"], ids=lambda fill: repr(fill["text"]))
def test_tools_take_so_many_bytes(http: TestClient, fill: dict[str, Any]) -> None:
    room = MAX_TOOLS_BYTES - len(json.dumps([LIMITS["tool"]], separators=(",", ":")))
    chat_on_device({"tools": [filled(room, fill, "description")]})
    over = {"tools": [filled(room + 1, fill, "description")]}
    with pytest.raises(RequestError) as refusal:
        chat_on_device(over)
    assert (str(refusal.value), refusal.value.param) == (LIMITS["large"], "tools")
    assert ask(http, "chat", over).json()["error"]["message"] == LIMITS["large"]


def test_so_many_tools_are_taken() -> None:
    tools = [{"type": "function", "function": {"name": f"f{at}"}} for at in range(MAX_TOOLS + 1)]
    chat_on_device({"tools": tools[1:]})
    with pytest.raises(RequestError) as refusal:
        chat_on_device({"tools": tools})
    assert str(refusal.value) == LIMITS["many"]


@pytest.mark.parametrize("fill", LIMITS["fills"], ids=lambda fill: repr(fill["text"]))
def test_schemas_take_so_many_bytes_without_annotations(fill: dict[str, Any]) -> None:
    bare = {"type": "object", "properties": {"": {}}}
    room = MAX_SCHEMAS_BYTES - len(json.dumps(bare, separators=(",", ":")))
    check_schemas([filled(room, fill, "name")])
    with pytest.raises(RequestError) as refusal:
        check_schemas([filled(room + 1, fill, "name")])
    assert (str(refusal.value), refusal.value.param) == (LIMITS["schemas"], "tools")


@pytest.mark.parametrize(("given", "param"), [({"model": "another"}, "model"), ({"model": 5}, "model")])
def test_only_the_loaded_model_is_taken(given: dict[str, Any], param: str) -> None:
    chat_on_device({"model": "sample"})
    with pytest.raises(RequestError) as refusal:
        chat_on_device(given)
    assert refusal.value.param == param
