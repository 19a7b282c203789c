"""The hybrid client with the CPU artifact of the sample as device and `nearfar`'s own server as cloud, on this machine.

Both run the same weights, so a greedy answer is one text, whoever gives which part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime import Engine
from nearfar.errors import DeviceError, EngineError
from nearfar.fallback_server.engines.local import TextOptions
from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
from nearfar.routing import Endpoint, HybridClient, Policy
from nearfar.routing.policy import MonitorOptions, RetryOptions
from nearfar.routing.shapes import Provenance
from tests.support.artifacts import Built
from tests.support.paths import ROOT
from tests.support.proxy import Proxy
from tests.support.servers import RunningServer

ASK: list[Any] = [{"role": "user", "content": "Tell me about the fox."}]
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
POLICY = Policy(retry=RetryOptions(base=0.01))


def difficulty(prompt: str) -> float:
    return 0.9 if "Prove" in prompt else 0.1


@pytest.fixture(scope="module")
def artifact(built: Built) -> Path:
    return built.of(ROOT / "examples" / "sample-model", "q4") / "cpu"


@pytest.fixture(scope="module")
def device(artifact: Path) -> Iterator[Engine]:
    with Engine.load(artifact, threads=1, kv_memory="32MB") as engine:
        yield engine


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[RunningServer]:
    options = EngineOptions(threads=1, kv_memory="32MB", text=replace(TextOptions(), text_processes=1, template_timeout=10))
    made = RunningServer(lambda: open_engine([str(artifact)], "artifact", options))
    yield made
    made.close()


@pytest.fixture
def cloud(server: RunningServer) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(device: Engine) -> str:
    """The answer without any trouble."""
    return device.chat.completions.create(ASK, **GREEDY).choices[0].message.content


def ask(client: HybridClient, messages: list[Any] = ASK, **more: Any) -> tuple[str, Provenance]:
    chunks = list(client.chat.completions.create(messages, stream=True, **{**GREEDY, **more}))
    told = [chunk.x_nearfar for chunk in chunks if chunk.x_nearfar is not None]
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), told[-1]


def codes(told: Provenance) -> list[str]:
    return [reason.code for reason in told.reasons]


def lose_after(engine: Engine, tokens: int) -> None:
    """The device fails once, so many steps from now."""
    executor: Any = engine.asynchronous.core.executor
    run, left = executor.run, 2 * tokens

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            executor.run = run
            raise DeviceError("device lost")
        return run(*args, **kwargs)

    executor.run = failing


def test_easy_stays_long_goes_hard_goes(device: Engine, cloud: Proxy, expected: str) -> None:
    with HybridClient(device=device, cloud=cloud.address, policy=POLICY, difficulty=difficulty) as client:
        text, told = ask(client)
        assert (text, told.route, cloud.connections) == (expected, "device", 0)
        text, told = ask(client, [{"role": "user", "content": "Prove it."}])
        assert (told.route, codes(told)) == ("cloud", ["hard"])
        pages = device.asynchronous.core.scheduler.table
        words = "fox " * (device.context - 45)
        text, told = ask(client, [{"role": "user", "content": words}], max_tokens=64, x_nearfar={"mode": "prefer_device"})
        assert pages.page_size
        assert (told.route, "context" in codes(told)) == ("cloud", True) or told.route is None
