"""Calls of tools by real models have matching arguments on every device, whatever the models prefer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from nearfar.edge_runtime import Engine
from tests.support.backends import FAST, Lab

BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "pages": {"type": "integer", "minimum": 1, "maximum": 900},
        "kind": {"enum": ["play", "novel"]},
    },
    "required": ["title", "pages", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "lend", "description": "Lends a book.", "parameters": BOOK}}
]
ASK = [{"role": "user", "content": "Lend me a book."}]


def test_arguments_match_their_schema(classics: Engine, backend: str) -> None:
    for seed in range(2 if backend in FAST else 1):
        made = classics.chat.completions.create(
            ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1.5, seed=seed,
            max_tokens=400,
        )  # fmt: skip
        choice = made.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), BOOK)


def test_a_call_and_its_result_go_on_to_an_answer(classics: Engine) -> None:
    asked = classics.chat.completions.create(
        ASK, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "lend"}}, max_tokens=400,
        temperature=1.5, seed=1,
    ).choices[0].message  # fmt: skip
    assert asked.tool_calls is not None
    history = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call.model_dump() for call in asked.tool_calls],
        },
        {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "lent"},
    ]
    with classics.chat.completions.create(
        history, tools=TOOLS, tool_choice="none", stream=True, max_tokens=8, ignore_eos=True
    ) as stream:
        deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas)
    assert not any(delta.tool_calls for delta in deltas)


def test_the_artifact_says_how_its_model_writes_calls(lab: Lab) -> None:
    manifest = json.loads((lab.artifact("q4", "cpu") / "manifest.json").read_text())
    assert manifest["answers"]["calls"]["begin"] == "<tool_call>"


def test_a_served_artifact_calls_the_same_tools(lab: Lab) -> None:
    pytest.importorskip("xgrammar", reason="the server's library for grammars is not here")
    from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
    from tests.support.servers import RunningServer

    options = EngineOptions(names=("classics",), device="cpu", kv_memory="64MB")
    artifact = str(lab.artifact("q4", "cpu"))
    server = RunningServer(lambda: open_engine([artifact], "artifact", options))
    try:
        body = {
            "model": "classics", "messages": ASK, "tools": TOOLS, "tool_choice": "required",
            "parallel_tool_calls": False, "temperature": 1.5, "seed": 1, "max_tokens": 400,
        }  # fmt: skip
        made = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60).json()
        (call,) = made["choices"][0]["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), BOOK)
        assert made["choices"][0]["finish_reason"] == "tool_calls"
    finally:
        server.close()
