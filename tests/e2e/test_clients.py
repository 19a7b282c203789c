"""The clients of 2026 at their defaults: texts, streams, tools, structured output, a prompt that is too long.

Each client is a program of tests/clients, in one of the environments that `make clients` makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nearfar.fallback_server.engines.local import TextOptions
from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
from tests.support.paths import ROOT
from tests.support.servers import MODEL, RunningServer, tiny_checkpoint, tiny_engine
from tests.support.turns import paired, share

ENVIRONMENTS = ROOT / "out" / "clients"
CONTEXT = 4096
FOLDER = ROOT / "tests" / "clients"
OFFLINE = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""An environment in which LiteLLM does not ask the network for prices."""
UNFORCED = ("pydantic_ai", "instructor")
"""Clients whose tools no default makes the model call."""

pytestmark = pytest.mark.skipif(not ENVIRONMENTS.exists(), reason="no clients are installed: make clients")

OVERFLOW = {
    "openai": ["BadRequestError", "BadRequestError"],
    "anthropic": ["BadRequestError"],
    "agents": ["BadRequestError"],
    "pydantic_ai": ["ModelContextWindowExceededError"] * 3,
    "langchain": ["ContextOverflowError"] * 3,
    "litellm": ["ContextWindowExceededError"] * 2,
    "instructor": ["InstructorRetryException"],
    "ollama": ["ResponseError"],
    "node/openai": ["BadRequestError"] * 2,
    "node/anthropic": ["BadRequestError"],
    "node/ai-sdk": ["APICallError"] * 3,
    "node/ollama": ["ResponseError"],
}
"""The error that each client raises for a prompt that is too long: its own class for that, if it has one."""


@pytest.fixture(scope="module", params=[engine for _, engine in paired(["server"], ["artifact", "torch"])])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    if request.param == "torch":
        tiny_checkpoint(directory, context=CONTEXT)
        text = replace(TextOptions(), text_processes=1, template_timeout=10)
        options = EngineOptions(names=(MODEL,), dtype="float32", threads=1, kv_memory="64MB", text=text)
        made = RunningServer(lambda: open_engine([str(directory)], "torch", options))
    else:
        made = RunningServer(lambda: tiny_engine(directory, context=CONTEXT, pages=1024))
    yield made
    made.close()


def _program(client: str) -> list[str]:
    """The command of a client. Node finds packages beside the program, so the program is copied to them."""
    if client.startswith("node/"):
        shutil.copytree(FOLDER / "node", ENVIRONMENTS / "node", dirs_exist_ok=True)
        return ["node", str(ENVIRONMENTS / f"{client}.mjs")]
    name = "instructor" if client == "instructor" else "clients"
    return [str(ENVIRONMENTS / name / "bin" / "python"), str(FOLDER / f"{client}_client.py")]


@cache
def _asked(client: str, address: str) -> Any:
    """The results of a client, which runs once for all tests: its imports take seconds."""
    command = [*_program(client), address, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=OFFLINE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("client", share(list(OVERFLOW), 2))
def test_a_client_works_at_its_defaults(server: RunningServer, client: str) -> None:
    found = _asked(client, server.address)
    groups = found["texts"] if found["texts"] and isinstance(found["texts"][0], list) else [found["texts"]]
    for texts in groups:
        assert all(text and text == texts[0] for text in texts), "a stream is another text than the whole"
    assert found["parsed"]
    for trip in found["parsed"]:
        assert trip["city"] in ("Oslo", "Rome")
        assert 1 <= trip["days"] <= 3
    assert set(found["called"]) <= {"Oslo", "Rome"}
    assert found["called"] or client in UNFORCED
    assert all(found["ended"])
    for text, name in zip(found["overflow"], OVERFLOW[client], strict=True):
        assert name in text.partition(":")[0].split(), text[:600]
        assert str(CONTEXT) in text.replace(",", ""), text[:600]
