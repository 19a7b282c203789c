"""`nearfar serve` while its model is loaded: it already listens, and reports what it waits for."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from nearfar.edge_runtime.progress import Progress, Tell
from nearfar.errors import CheckpointError, NearfarError, RequestError
from nearfar.fallback_server import serve
from nearfar.fallback_server.engines.base import ServerEngine
from nearfar.fallback_server.engines.local import LocalEngine
from nearfar.fallback_server.serve import ServeOptions
from nearfar.remote.server import root_of
from tests.support.clouds import Cloud, listing
from tests.support.commands import nearfar
from tests.support.servers import MODEL, tiny_engine

PATIENCE = 60


class Loading:
    """A load that takes as long as the test wants."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.tell: Tell | None = None
        self.closed = False
        self._folder, self._error = folder, error

    async def open(self, models: Sequence[str], kind: str, options: object, tell: Tell) -> ServerEngine:
        self.tell = tell
        tell(Progress("kernels", 3, 57))
        self.begun.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.closed = True
            raise
        if self._error is not None:
            raise self._error
        return await tiny_engine(self._folder)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port()}", timeout=PATIENCE)


def serving(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, loading: Loading, tell: Tell | None = None
) -> asyncio.Task[None]:
    monkeypatch.setattr(serve, "open_engine", loading.open)
    assert client.base_url.port is not None
    options = ServeOptions(port=client.base_url.port)
    return asyncio.create_task(serve._main(("model",), options, None, tell))


async def test_it_listens_while_it_loads_and_says_what_it_waits_for(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loading, told = Loading(tmp_path), list[Progress]()
    running = serving(client, monkeypatch, loading, told.append)
    await asyncio.wait_for(loading.begun.wait(), PATIENCE)
    health, ready = await client.get("/health"), await client.get("/ready")
    assert (health.status_code, ready.status_code) == (200, 503)
    assert health.json() == ready.json()
    assert ready.json() == {
        "status": "loading",
        "waiting_for": "compiling kernels, 3 of 57",
        "phase": "kernels",
        "done": 3,
        "total": 57,
    }
    assert ready.headers["retry-after"] == "2"
    body = {"model": MODEL, "prompt": [5], "max_tokens": 2}
    refused = await client.post("/v1/completions", json=body)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "2"
    assert refused.json()["error"]["code"] == "loading"
    assert "compiling kernels, 3 of 57" in refused.json()["error"]["message"]
    named = await client.get("/ready", headers={"host": "elsewhere.example"})
    assert named.status_code == 421
    assert "serves" not in capsys.readouterr().out
    loading.gate.set()
    while (ready := await client.get("/ready")).json()["status"] == "loading":
        await asyncio.sleep(0.01)
    assert ready.json() == {"status": "ready"}
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert f"nearfar serves {MODEL} at {client.base_url}"[:-1] in capsys.readouterr().out
    assert told[-1].over
    assert loading.tell is not None
    # the progress of a request: the server is not waiting any more
    loading.tell(Progress("prompt", 256, 2048))
    assert told[-1].over
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, PATIENCE)


async def test_while_it_drains_new_connections_are_told_so(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A load balancer that calls /ready, and a new client, get an answer instead of a refused connection."""
    loading = Loading(tmp_path)
    loading.gate.set()
    running = serving(client, monkeypatch, loading)
    drained, close = asyncio.Event(), LocalEngine.close

    async def closing(self: LocalEngine, drain: float = 0.0) -> None:
        await drained.wait()
        await close(self)

    monkeypatch.setattr(LocalEngine, "close", closing)
    await asyncio.wait_for(loading.begun.wait(), PATIENCE)
    while (await client.get("/ready")).json() != {"status": "ready"}:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    while (ready := await client.get("/ready", headers={"connection": "close"})).status_code == 200:
        await asyncio.sleep(0.01)
    assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
    asked = {"model": MODEL, "prompt": [5], "max_tokens": 2}
    async with httpx.AsyncClient(base_url=client.base_url, timeout=PATIENCE) as late:
        refused = await late.post("/v1/completions", json=asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) > 0
        assert (await late.get("/health")).status_code == 200
    drained.set()
    await asyncio.wait_for(running, PATIENCE)
    with pytest.raises(httpx.ConnectError):
        await client.get("/health")


async def test_a_second_ctrl_c_ends_a_server_that_drains(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loading = Loading(tmp_path)
    loading.gate.set()
    running = serving(client, monkeypatch, loading)
    close, drains = LocalEngine.close, list[float]()

    async def closing(self: LocalEngine, drain: float = 0.0) -> None:
        drains.append(drain)
        try:
            await asyncio.sleep(drain)
        finally:
            await close(self)

    monkeypatch.setattr(LocalEngine, "close", closing)
    await asyncio.wait_for(loading.begun.wait(), PATIENCE)
    while (await client.get("/ready")).json() != {"status": "ready"}:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    while not drains:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(running, 10)
    assert drains[0] == ServeOptions().drain


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_signal_ends_a_server_that_still_loads_without_waiting_for_its_threads(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: signal.Signals,
    status: int,
) -> None:
    loading, ended = Loading(tmp_path), list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    running = serving(client, monkeypatch, loading)
    await asyncio.wait_for(loading.begun.wait(), PATIENCE)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(running, PATIENCE)
    assert loading.closed
    assert ended == [status]


async def test_a_load_that_fails_ends_the_server_with_its_error(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loading = Loading(tmp_path, CheckpointError("config.json cannot be read"))
    running = serving(client, monkeypatch, loading)
    await asyncio.wait_for(loading.begun.wait(), PATIENCE)
    loading.gate.set()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        await asyncio.wait_for(running, PATIENCE)
    with pytest.raises(httpx.ConnectError):
        await client.get("/health")


async def test_a_port_that_is_taken_is_told_before_anything_is_loaded(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loading = Loading(tmp_path)
    port = client.base_url.port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(
            NearfarError, match=rf"cannot listen at 127\.0\.0\.1:{port}, address already in use: .*--port"
        ):
            await asyncio.wait_for(serving(client, monkeypatch, loading), PATIENCE)
    assert not loading.begun.is_set()
    assert "address already in use" not in caplog.text, "one sentence is enough"


async def test_a_front_says_which_models_it_has(
    client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"m{number}" for number in range(10)]
    with Cloud(lambda path, body: iter([listing(*names)])) as cloud, caplog.at_level(logging.INFO):
        options = ServeOptions(port=client.base_url.port or 0)
        running = asyncio.create_task(serve._main((cloud.address,), options, None, None))
        while not (out := capsys.readouterr().out):
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, PATIENCE)
    assert out.startswith("nearfar serves m0, m1, m2, m3, m4, m5, m6, m7 and 2 more (/v1/models) at http://")
    (line,) = [record.getMessage() for record in caplog.records if "listening" in record.getMessage()]
    assert line.endswith("; asking the upstream servers for their models …")


@pytest.mark.parametrize(
    ("address", "root"),
    [
        ("http://h:1/v1/chat/completions", "http://h:1"),
        ("http://h/base/v1/models/", "http://h/base"),
        ("http://h/api/chat", "http://h"),
    ],
)
def test_the_address_of_a_path_is_refused(address: str, root: str) -> None:
    done = nearfar("serve", address)
    assert done.returncode == 1
    assert f"is the address of one path: give the server's own address, {root}\n" in done.stderr


def test_an_error_about_an_address_has_no_password() -> None:
    with pytest.raises(RequestError, match=r"^http://h/v1/messages is the address .*, http://h$"):
        root_of("http://me:secret@h/v1/messages")


@pytest.mark.parametrize(
    "address", ["http://h", "http://h/v1", "http://h/v1/", "https://h/openai/v1", "http://h/models"]
)
def test_the_address_of_a_server_is_taken(address: str) -> None:
    assert root_of(address) == address.rstrip("/").removesuffix("/v1")
