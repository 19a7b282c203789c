"""The torch engine in its process, which is killed, hangs, or loses its parent; and how its requests end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nearfar.edge_runtime.grammars import Grammar
from nearfar.errors import CheckpointError, EngineError, OverloadError, RequestError
from nearfar.fallback_server.backend import EmbedRequest, Sampling, TokenRequest
from nearfar.fallback_server.torch_engine import TorchBackend, TorchOptions
from tests.shared_data import shared_data
from tests.support.torch_rig import GREEDY, Rig

OPTIONS = TorchOptions(device="cpu", threads=1, hang_seconds=2.0, max_running=2, max_waiting=3)


@pytest.fixture
def stories() -> Path:
    return shared_data("models", "stories260K")


async def tokens(backend: TorchBackend, request: TokenRequest) -> list[int | None]:
    return [event.token async for event in backend.submit(request)]


def request(name: str, count: int = 30, first: int = 1) -> TokenRequest:
    return TokenRequest(name, (first,), count, GREEDY)


async def until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_life_with_deaths(stories: Path) -> None:
    files = psutil.Process().num_fds()
    backend = await TorchBackend.load(stories, OPTIONS)
    want = Rig(stories).tokens([request("a")])[0]
    try:
        assert await tokens(backend, request("a")) == want
        assert await backend.alive()
        await _killed(backend, want)
        await _hung(backend, want)
        await _closed_streams(backend, want)
        await _grammars(backend, want)
        assert backend.stats().restarts == 2
        await _drained(backend, want)
    finally:
        await backend.close()
    with pytest.raises(OverloadError):
        backend.submit(request("late"))
    assert psutil.Process().num_fds() <= files
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def _grammars(backend: TorchBackend, want: list[int | None]) -> None:
    """Grammars are compiled beside the engine: valid ones are followed, invalid ones rejected, and an
    abandoned one delays nobody.
    """
    await backend.submit(with_grammar("left", "regex", "a{1,9}")).aclose()
    free = asyncio.create_task(tokens(backend, request("free")))
    digits = await tokens(backend, with_grammar("digits", "regex", "[0-9]{3}"))
    assert digits[-1] == 2
    assert len(digits) <= 5
    for kind, text in {"json_schema": '{"type": 3}', "regex": "([", "ebnf": "root ::= other"}.items():
        with pytest.raises(RequestError, match=r"cannot be (compiled|enforced)"):
            await tokens(backend, with_grammar("bad", kind, text))
    assert await free == want


def with_grammar(name: str, kind: Any, text: str) -> TokenRequest:
    return replace(request(name), grammar=Grammar(kind, text), stop_token_ids=frozenset({2}))


async def _killed(backend: TorchBackend, want: list[int | None]) -> None:
    """After SIGKILL, requests with tokens get an error at once, and requests without tokens are served by the
    next worker.
    """
    flying = [backend.submit(request(f"flying{i}", 450)) for i in range(2)]  # as many requests as run at once
    for stream in flying:
        await anext(stream)
    waiting = [asyncio.create_task(tokens(backend, request(f"waiting{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadError):
        backend.submit(request("one too many"))
    assert backend.worker_pid is not None
    os.kill(backend.worker_pid, signal.SIGKILL)
    for stream in flying:
        with pytest.raises(EngineError):
            async for _ in stream:
                pass
    assert not await backend.alive()  # the error came before the next worker was ready
    assert await asyncio.gather(*waiting) == [want] * 3
    assert backend.stats().restarts == 1
    assert await backend.alive()


async def _hung(backend: TorchBackend, want: list[int | None]) -> None:
    """A worker without messages counts as not alive within seconds, and is killed."""
    stream = backend.submit(request("hung", 450))
    await anext(stream)
    pid = backend.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    waiting = asyncio.create_task(tokens(backend, request("behind")))
    stopped = time.monotonic()
    with pytest.raises(EngineError):
        async for _ in stream:
            pass
    assert not await backend.alive()
    assert time.monotonic() - stopped < 60.0
    assert await waiting == want
    assert not psutil.pid_exists(pid)


async def _closed_streams(backend: TorchBackend, want: list[int | None]) -> None:
    """Closing and cancelling free places for waiting requests; bad requests are rejected;
    embeddings arrive.
    """
    streams = [backend.submit(request(f"closed{i}", 450)) for i in range(2)]
    waiting = asyncio.create_task(tokens(backend, request("next")))
    await anext(streams[0])
    await streams[0].aclose()
    assert [event async for event in streams[0]] == []
    await backend.cancel("closed1")
    rest = [event async for event in streams[1]]
    assert rest[-1].finish == "abort"
    assert await waiting == want
    with pytest.raises(RequestError):
        backend.submit(TokenRequest("bad", (1,), 5, Sampling(temperature=float("nan"))))
    backend.submit(request("twice"))
    with pytest.raises(RequestError, match="twice"):
        backend.submit(request("twice"))
    await backend.cancel("twice")
    for tokens_of in ((1, 2, 3), (4,)):
        assert len(await backend.embed(EmbedRequest("vector", tokens_of, "mean"))) == 64
    with pytest.raises(RequestError):
        await backend.embed(EmbedRequest("vector", (), "mean"))
    await until(lambda: backend.stats().running == 0)
    assert backend.stats().cache_usage == 0.0


async def _drained(backend: TorchBackend, want: list[int | None]) -> None:
    """Closing lets requests under way finish."""
    under_way = [asyncio.create_task(tokens(backend, request(f"last{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    process = psutil.Process(backend.worker_pid)
    await backend.close(drain=30.0)
    assert await asyncio.gather(*under_way) == [want] * 3
    assert not process.is_running()


async def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        await TorchBackend.load(tmp_path, OPTIONS)


PARENT = """
import asyncio, sys
from nearfar.fallback_server.torch_engine import TorchBackend, TorchOptions

async def main():
    backend = await TorchBackend.load(sys.argv[1], TorchOptions(device="cpu", threads=1))
    print(backend.worker_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_worker_does_not_outlive_its_parent(stories: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(stories)], stdout=subprocess.PIPE, env={
        **os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)})  # fmt: skip
    assert parent.stdout is not None
    with parent.stdout:
        worker = psutil.Process(int(parent.stdout.readline()))
    assert worker.is_running()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.wait(10.0)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
