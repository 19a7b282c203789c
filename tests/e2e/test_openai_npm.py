"""The official openai package of npm against `nearfar serve` with the torch engine."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.test_serve import Process
from tests.support.paths import ROOT, WEB, node

pytest.importorskip("nearfar.fallback_server.torch_engine.client", reason="the torch engine is not here")

SCRIPT = WEB / "test" / "server" / "openai-client.mjs"


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    if not (WEB / "node_modules" / "openai").is_dir():
        pytest.skip("web/node_modules/openai is missing (run `make setup`)")
    model = ROOT / "examples" / "sample-model"
    made = Process(model, "--engine", "torch", "--threads", "1", "--dtype", "float32", "--name", "sample")
    yield made
    made.end()


@pytest.fixture(scope="module")
def found(server: Process) -> dict[str, Any]:
    made = subprocess.run(
        [node(), str(SCRIPT), server.url, "sample"], capture_output=True, text=True, timeout=90, check=False
    )
    assert made.returncode == 0, made.stderr
    result: dict[str, Any] = json.loads(made.stdout)
    return result


def test_answers_are_the_same_streamed_and_whole(found: dict[str, Any]) -> None:
    assert found["models"] == ["sample"]
    assert found["whole"]["text"] == found["streamed"]["text"]
    assert found["streamed"]["pieces"] > 3
    for kind in ("whole", "streamed"):
        usage = found[kind]["usage"]
        assert 1 <= usage["completion_tokens"] <= 24
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_tools_are_called(found: dict[str, Any]) -> None:
    assert len(found["calls"]) == 2
    for call in found["calls"]:
        assert (call["finish"], call["type"], call["function"]["name"]) == (
            "tool_calls",
            "function",
            "weather",
        )
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


def test_an_abort_ends_the_request_in_the_server(server: Process, found: dict[str, Any]) -> None:
    assert 3 <= found["aborted"] < 50
    wanted = (
        'requests_total{model_name="sample",outcome="aborted"} 1.0',
        'num_requests_running{model_name="sample"} 0.0',
    )
    deadline = time.monotonic() + 20
    while (text := httpx.get(f"{server.url}/metrics", timeout=10).text) and time.monotonic() < deadline:
        if all(line in text for line in wanted):
            break
        time.sleep(0.1)
    assert [line for line in wanted if line not in text] == []


def test_errors_are_the_clients_own_classes(found: dict[str, Any]) -> None:
    wrong, absent = found["refused"]
    assert wrong == {"kind": "BadRequestError", "status": 400, "param": "temperature"}
    assert (absent["kind"], absent["status"], absent["param"]) == ("NotFoundError", 404, "model")
