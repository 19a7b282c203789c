"""Answers with a response_format in the package's engine, in Node and in a real Chromium, parse and are valid
for every seed.
"""

from __future__ import annotations

import json

from jsonschema import Draft202012Validator

from tests.support.artifacts import Built
from tests.support.browser import browser, new_page, serve
from tests.support.web_hosts import asked_in_node

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 120},
        "kinds": {"type": "array", "items": {"enum": ["bear", "fox", 1, None]}, "minItems": 1, "maxItems": 3},
        "wild": {"type": "boolean"},
    },
    "required": ["name", "age", "kinds"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
ASK = """
const ask = (seed) => engine.chat.completions.create({
  messages: [{ role: "user", content: "Who lives in the forest?" }],
  response_format: %s, temperature: 1.5, max_tokens: 900, seed,
});
const answers = await Promise.all([1, 2].map(ask));
return answers.map(({ choices: [choice] }) => [choice.finish_reason, choice.message.content]);
"""


def check(reason: str, text: str) -> None:
    assert reason == "stop", text
    Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_answers_in_node_are_valid(built: Built) -> None:
    told = asked_in_node("objects", built("classics-7M", "q4") / "wasm", FORMAT, 10)
    for reason, text, scores in told["answers"]:
        check(reason, text)
        assert scores is None or scores > 0
    assert len({text for _, text, _ in told["answers"]}) == 10
    assert told["again"] == told["answers"][0]
    assert told["free"][0] == told["free"][1]


def test_answers_in_chromium_are_valid(built: Built) -> None:
    with browser() as running, serve(built("classics-7M", "q4")) as address:
        page = new_page(running, address)
        assert page.answer(prompt="x", max_tokens=1, temperature=0, raw=1) is not None
        for reason, text in page.run(ASK % json.dumps(FORMAT)):
            check(reason, text)
        assert page.complaints == []
