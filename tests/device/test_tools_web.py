"""Calls of tools in the package's engine, in Node and in a real Chromium: for every seed they call an offered
tool, with valid arguments.
"""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from tests.support.artifacts import Built
from tests.support.browser import browser, new_page, serve
from tests.support.web_hosts import asked_in_node

SCHEMAS: dict[str, dict[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["bear", "fox"]},
            "most": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["kind"],
        "additionalProperties": False,
    },
    "count": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
ASK = """
const ask = async (seed) => {
  const { choices: [choice] } = await engine.chat.completions.create({
    messages: [{ role: "user", content: "Who lives in the forest?" }], tools: %s,
    tool_choice: "required", parallel_tool_calls: false, temperature: 1.5, max_tokens: 900, seed,
  });
  return [choice.finish_reason, choice.message.content, choice.message.tool_calls];
};
return [await ask(1), await ask(2)];
"""


def check(reason: str, text: str | None, calls: list[dict[str, Any]]) -> None:
    assert (reason, text) == ("tool_calls", None)
    [call] = calls
    called = call["function"]
    Draft202012Validator(SCHEMAS[called["name"]]).validate(json.loads(called["arguments"]))


def test_calls_in_node_are_valid(built: Built) -> None:
    told = asked_in_node("tools", built("classics-7M", "q4") / "wasm", TOOLS, 6)
    assert "tools" in told["features"]
    for answer in told["answers"]:
        check(*answer)


def test_calls_in_chromium_are_valid(built: Built) -> None:
    with browser() as running, serve(built("classics-7M", "q4")) as address:
        page = new_page(running, address)
        assert page.answer(prompt="x", max_tokens=1, temperature=0, raw=1) is not None
        for answer in page.run(ASK % json.dumps(TOOLS)):
            check(*answer)
        assert page.complaints == []
