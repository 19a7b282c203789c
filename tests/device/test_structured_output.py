"""Answers of real models match their schema on every device, whatever the models prefer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import httpx
import jsonschema
import pytest

from nearfar.edge_runtime import Engine
from tests.support.backends import BACKENDS, Lab
from tests.support.commands import nearfar
from tests.support.turns import paired

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "pages": {"type": "integer", "minimum": 1, "maximum": 900},
        "kind": {"enum": ["play", "novel"]},
        "read": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["title", "pages", "kind"],
}
BOOK = {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA}}
ASK = [{"role": "user", "content": "Which book do you like best?"}]


SEEDS = range(3)
ASKED = paired(BACKENDS, SEEDS)
"""Pairs of a backend and a seed."""


@pytest.mark.parametrize(("backend", "seed"), ASKED, indirect=["backend"])
def test_answers_validate_against_their_schema(classics: Engine, seed: int) -> None:
    made = classics.chat.completions.create(
        ASK, response_format=BOOK, temperature=1.5, seed=seed, n=2, max_tokens=400
    )
    for choice in made.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_streamed_beside_a_request_that_may_say_anything(classics: Engine) -> None:
    params = {"temperature": 1.5, "seed": 7, "max_tokens": 24}
    alone = classics.completions.create("The", **params).choices[0].text
    with classics.chat.completions.create(
        ASK, stream=True, response_format={"type": "regex", "regex": "[a-z]{4}( [a-z]{3}){5}"}, **params
    ) as stream:
        beside = classics.completions.create("The", **params).choices[0].text
        text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert re.fullmatch("[a-z]{4}( [a-z]{3}){5}", text)
    assert beside == alone


def test_a_served_artifact_follows_the_same_schema(lab: Lab) -> None:
    pytest.importorskip("xgrammar", reason="the server's library for grammars is not here")
    from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
    from tests.support.servers import RunningServer

    options = EngineOptions(names=("classics",), device="cpu", kv_memory="64MB")
    artifact = str(lab.artifact("q4", "cpu"))
    server = RunningServer(lambda: open_engine([artifact], "artifact", options))
    try:
        for seed in range(3):
            body = {
                "model": "classics",
                "messages": ASK,
                "response_format": BOOK,
                "temperature": 1.5,
                "seed": seed,
                "max_tokens": 400,
            }
            made = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60).json()
            choice = made["choices"][0]
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    finally:
        server.close()


def test_the_command_line_takes_a_schema(lab: Lab, tmp_path: Path) -> None:
    schema = tmp_path / "book.json"
    schema.write_text(json.dumps(SCHEMA))

    def run(*options: str | Path) -> CompletedProcess[str]:
        return nearfar("run", lab.artifact("q4", "cpu"), "A book?", "--seed", "2", *options)

    jsonschema.validate(json.loads(run("--schema", schema).stdout), SCHEMA)
    assert run("--json-object", "--max-tokens", "8").stdout.startswith("{")
    both = run("--json-object", "--schema", schema)
    assert (both.returncode, "not both" in both.stderr) == (1, True)
    schema.write_text("{")
    assert "is not JSON" in run("--schema", schema).stderr
