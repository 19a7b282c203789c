"""vLLM as a child process of the server, with a stand-in that implements its command line and HTTP
interface.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from nearfar.errors import EngineError, RequestError
from nearfar.fallback_server.engines import opening, vllm
from nearfar.fallback_server.engines.opening import EngineOptions, guess, open_engine
from nearfar.fallback_server.engines.vllm import VllmEngine, VllmOptions
from tests.support.servers import RunningServer

STAND_IN = Path(__file__).parents[1] / "support" / "vllm_stand_in.py"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = tmp_path_factory.mktemp("bin") / "vllm"
    program.write_text(f"#!{sys.executable}\n" + STAND_IN.read_text().split("\n", 1)[1])
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def options(command: str, **more: Any) -> EngineOptions:
    quick = VllmOptions(command, start=60.0, look=0.2, failures=2, wait=0.05, stop=5.0, **more)
    return EngineOptions(vllm=quick)


@pytest.fixture(scope="module")
def server(command: str) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_SECRET_KEY", "x")
        patch.setenv("HF_TOKEN", "hf_x")
        made = options(command, arguments=("--max-model-len=99",))
        running = RunningServer(lambda: open_engine(("org/model",), "vllm", made))
    yield running
    running.close()


def ask(server: RunningServer, text: str = "Hello") -> Any:
    body = {"model": "org/model", "messages": [{"role": "user", "content": text}], "priority": 3}
    return httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)


def told(server: RunningServer) -> Any:
    return json.loads(ask(server).json()["choices"][0]["message"]["content"])


def engine_of(server: RunningServer) -> VllmEngine:
    assert isinstance(server.engine, VllmEngine)
    return server.engine


def test_it_answers_with_a_key_of_its_own_and_no_other_secret(server: RunningServer) -> None:
    models = httpx.get(f"{server.address}/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("org/model", 99)]
    said = told(server)
    assert {"VLLM_API_KEY", "HF_TOKEN"} <= set(said["environment"])
    assert "SOME_SECRET_KEY" not in said["environment"]
    assert said["body"]["priority"] == 3
    child = engine_of(server).child
    assert len(child.key) >= 32
    assert httpx.get(f"{child.address}/v1/models").status_code == 401
    assert child.address.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("how", ["die", "hang"])
def test_it_is_restarted(server: RunningServer, how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=vllm.__name__)
    child = engine_of(server).child
    before, restarts = told(server)["pid"], child.restarts
    ask(server, how)
    # Nothing is asked meanwhile: three questions that fail would open the address's circuit for ten seconds.
    until = time.monotonic() + 60
    while "vLLM is healthy again" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert told(server)["pid"] != before
    assert child.restarts == restarts + 1
    assert engine_of(server).stats().restarts == restarts + 1
    assert not psutil.pid_exists(before)


def test_what_it_said_is_told_where_it_does_not_start(command: str) -> None:
    with pytest.raises(Exception, match=r"(?s)status 3.*no such model\\x1b\[31m") as raised:
        RunningServer(lambda: open_engine(("broken",), "vllm", options(command)))
    assert isinstance(raised.value, EngineError)


async def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no .*nothing.: install vllm, or"):
        await open_engine(("org/model",), "vllm", options(str(tmp_path / "nothing")))


async def test_it_ends_with_its_server(command: str) -> None:
    engine = await open_engine(("org/model",), "vllm", options(command))
    assert isinstance(engine, VllmEngine)
    process = engine.child._process
    assert process is not None
    os.kill(process.pid, 0)
    await engine.close()
    assert process.returncode is not None


def test_auto_takes_it_where_there_is_a_gpu_and_the_program(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guess(["org/model"], command) == "torch"
    card = tmp_path / "nvidiactl"
    card.touch()
    monkeypatch.setattr(vllm, "CARD", card)
    assert guess(["org/model"], command) == "vllm"
    assert guess(["org/model"], str(tmp_path / "nothing")) == "torch"
    assert guess(["http://a"], command) == "upstream"
    monkeypatch.setattr(opening, "holds_artifacts", lambda path: True)
    assert guess(["artifact"], command) == "artifact"
