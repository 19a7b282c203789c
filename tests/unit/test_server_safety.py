"""Properties of the artifact engine alone: duplicate ids, an engine that hangs, and nothing that grows with
the number of requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.fallback_server.engines.artifact import ArtifactBackend
from nearfar.fallback_server.engines.local import LocalEngine
from tests.support.hostile import COMPLETION, Rig, completion, open_rig
from tests.support.servers import RunningServer


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = open_rig("artifact", tmp_path_factory.mktemp("tiny"))
    yield made
    made.close()


@pytest.fixture
def server(rig: Rig) -> RunningServer:
    return rig.server


async def test_duplicate_ids_are_refused(rig: Rig, server: RunningServer) -> None:
    """The server makes the ids, so only a bug in the server could make two equal ones."""
    from nearfar.errors import RequestError
    from nearfar.fallback_server.backend import Sampling, TokenRequest

    engine = server.engine
    assert isinstance(engine, LocalEngine)
    backend = engine.backend
    assert isinstance(backend, ArtifactBackend)

    async def twice() -> None:
        request = TokenRequest("same", (1, 2), 30, Sampling(0.0))
        first: Any = backend.submit(request)
        with pytest.raises(RequestError, match="same"):
            backend.submit(request)
        await first.aclose()

    server.run(twice)
    await rig.nothing_left()


async def test_a_hung_engine_is_not_ready(
    rig: Rig, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nearfar.fallback_server.engines import artifact

    # For an engine that works, only a minute without a token counts, however busy the machine is.
    monkeypatch.setattr(artifact, "FRESH", 60.0)
    engine: Any = server.engine
    executor = engine.backend.core.executor
    run: Callable[..., Any] = executor.run
    hung = True

    def slow(*args: Any) -> Any:
        while hung:
            time.sleep(0.01)
        return run(*args)

    async with httpx.AsyncClient(base_url=server.address, timeout=30) as http:
        assert (await http.get("/ready")).status_code == 200
        executor.run = slow
        engine.backend.core.last_read = -math.inf  # long ago: a token must come now
        try:
            with monkeypatch.context() as impatient:
                impatient.setattr(artifact, "FRESH", 0.3)
                assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
        finally:
            hung = False
            del executor.run
        await rig.nothing_left()
        assert (await http.get("/ready")).status_code == 200


def footprint(server: RunningServer) -> dict[str, float]:
    """Measures that must not grow with the number of requests."""

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    engine: Any = server.engine
    return {
        "tasks": server.run(tasks),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "streams": len(engine.backend._streams) + len(engine._live),
        "calls": len(server.app.state.service.live),
    }


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
async def test_after_many_requests_everything_is_back_where_it_was(rig: Rig, server: RunningServer) -> None:
    async def one(http: httpx.AsyncClient, number: int) -> None:
        body = completion(max_tokens=20, prompt=f"Request {number}", stream=number % 2 == 0, n=1 + number % 3)
        if number % 5 == 0:
            body["temperature"] = -1
        async with http.stream("POST", COMPLETION, json=body) as response:
            async for _ in response.aiter_lines():
                if number % 4 == 0:
                    return

    async def many(count: int) -> dict[str, float]:
        async with httpx.AsyncClient(base_url=server.address, timeout=60) as http:
            for start in range(0, count, 20):
                await asyncio.gather(*(one(http, start + at) for at in range(20)))
        await rig.nothing_left()
        for _ in range(1500):  # the server sees the closed connections a little later
            if not server.connections:
                break
            await asyncio.sleep(0.02)
        return footprint(server)

    before = await many(20)
    after = await many(60)
    for _ in range(1500):  # a task or a file of the last connection may end a little later
        if not any(after[name] > held for name, held in before.items()):
            break
        await asyncio.sleep(0.02)
        after = footprint(server)
    assert {name: held for name, held in after.items() if held > before[name]} == {}, (before, after)
    assert before["calls"] == before["streams"] == 0
