"""Mixed traffic for a while, with wrong and abandoned requests; afterwards the server holds what it held
before.

NEARFAR_SOAK_SECONDS is the duration of the traffic; by default every kind of request comes many times.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from nearfar.fallback_server.http.keys import Key, add_key, hashed
from tests.e2e.test_serve import Process
from tests.shared_data import shared_data

pytest.importorskip("nearfar.fallback_server.torch_engine.client", reason="the torch engine is not here")

SECONDS = float(os.environ.get("NEARFAR_SOAK_SECONDS", "9"))
MODEL = "stories260K"
CLIENTS = 12
GROWTH = 48 << 20
"""The most bytes by which all processes together may grow: the allocators' arenas settle, while a leak of the
KV cache's size would show.
"""

REFUSED: list[dict[str, Any]] = [
    {"prompt": [1], "temperature": -1},
    {"prompt": [999_999]},
    {"prompt": [1] * 5000},
    {"prompt": [1], "n": 10**6},
    {"prompt": [1], "logprobs": 10**6},
    {"prompt": [1], "response_format": {"type": "regex", "regex": "("}},
    {"prompt": [1], "best_of": 2},
    {"prompt": [1], "model": "another"},
]


@dataclass(frozen=True)
class Held:
    """Resources that the server and its child processes hold. `tasks`: asyncio's, in the server."""

    processes: int
    handles: int
    memory: int
    tasks: int


@dataclass(frozen=True)
class Soaked:
    """The server under test and its keys."""

    process: Process
    user: str = "nf-user"
    admin: str = "nf-admin"

    def stats(self) -> dict[str, Any]:
        """The figures of /admin/stats."""
        headers = {"Authorization": f"Bearer {self.admin}", "Connection": "close"}
        answer = httpx.get(f"{self.process.url}/admin/stats", headers=headers, timeout=20)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def held(self) -> Held:
        """The resources held now."""
        tasks = self.stats()["tasks"]
        server = psutil.Process(self.process.process.pid)
        family = [server, *server.children(recursive=True)]
        return Held(
            len(family), sum(p.num_fds() for p in family), sum(p.memory_info().rss for p in family), tasks
        )


@pytest.fixture
def soaked(tmp_path: Path) -> Iterator[Soaked]:
    keys = tmp_path / "keys.toml"
    add_key(keys, Key("user", hashed(Soaked.user)))
    add_key(keys, Key("admin", hashed(Soaked.admin), admin=True))
    arguments = (
        "--threads",
        "1",
        "--keys",
        keys,
        "--kv-memory",
        "4MB",
        "--max-running",
        "8",
        "--max-requests",
        "10",
        "--log-level",
        "warning",
    )
    process = Process(shared_data("models", MODEL), "--engine", "torch", *arguments)
    yield Soaked(process)
    if process.process.poll() is None:
        process.process.kill()
        process.process.wait()


async def one(client: httpx.AsyncClient, r: random.Random) -> str:
    """Send one request of some kind; says how it ended."""
    kind = r.choices(
        ["stream", "whole", "leave", "wrong", "stranger", "grammar", "embed"], [6, 4, 5, 3, 1, 2, 1]
    )[0]
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": [1, *(r.randrange(3, 500) for _ in range(r.randrange(1, 80)))],
        "max_tokens": r.randrange(1, 60),
        "seed": r.randrange(2**40),
    }
    if kind == "wrong":
        answer = await client.post("/v1/completions", json={**body, **r.choice(REFUSED)})
        assert answer.status_code in (400, 404, 429), answer.text
    elif kind == "stranger":
        answer = await client.post(
            "/v1/completions", json=body, headers={"Authorization": "Bearer nf-nobody"}
        )
        assert answer.status_code == 401
    elif kind == "embed":
        answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": body["prompt"]})
        assert answer.status_code in (200, 429), answer.text
    elif kind in ("whole", "grammar"):
        if kind == "grammar":
            body |= {"response_format": {"type": "regex", "regex": "(yes|no)"}, "max_tokens": 20}
        answer = await client.post("/v1/completions", json={**body, "n": r.choice([1, 1, 3])})
        assert answer.status_code in (200, 429), answer.text
        if kind == "grammar" and answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] in ("yes", "no")
    else:
        leaves = r.randrange(1, 12) if kind == "leave" else None
        return f"{kind} {await streamed(client, body, leaves)}"
    return f"{kind} {answer.status_code}"


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], leaves: int | None) -> int:
    """Read a streamed answer; with `leaves` the client leaves after this many events of a longer answer."""
    lines: list[str] = []
    if leaves is not None:
        body = {**body, "max_tokens": 300, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code in (200, 429)
        async for line in response.aiter_lines():
            lines += [line] if line else []
            if leaves is not None and len(lines) >= leaves:
                return response.status_code
    if response.status_code == 200:
        assert lines[-1] == "data: [DONE]", lines[-1]
    return response.status_code


async def traffic(url: str, key: str, seconds: float, seed: int) -> Counter[str]:
    """Run several clients for `seconds`."""
    end = time.monotonic() + seconds
    ends: Counter[str] = Counter()
    headers = {"Authorization": f"Bearer {key}"}

    async def client(number: int) -> None:
        r = random.Random(f"{seed} {number}")
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=90) as http:
            while time.monotonic() < end:
                end_ = await one(http, r)
                ends[end_] += 1
                if end_.endswith("429"):
                    await asyncio.sleep(0.2)

    await asyncio.gather(*map(client, range(CLIENTS)))
    return ends


def settled(soaked: Soaked, seconds: float = 15) -> dict[str, Any]:
    """Wait until no request is under way, and give the figures then; fails with the figures if that takes too
    long.
    """
    deadline = time.monotonic() + seconds
    while True:
        stats = soaked.stats()
        engine, under_way = stats["engine"], stats["under_way"]
        idle = not any((engine["running"], engine["waiting"], under_way["requests"], under_way["tokens"]))
        if (idle and engine["cache_usage"] == 0) or time.monotonic() > deadline:
            return stats
        time.sleep(0.1)


def test_after_mixed_traffic_the_server_holds_what_it_held(soaked: Soaked) -> None:
    # The first seconds load what the server loads on first use: the grammar compiler, the tokenizer's
    # process, the arenas.
    asyncio.run(traffic(soaked.process.url, soaked.user, max(3.0, SECONDS / 3), 0))
    settled(soaked)
    before = soaked.held()
    ends = asyncio.run(traffic(soaked.process.url, soaked.user, SECONDS, 1))
    stats = settled(soaked)
    assert {"stream 200", "whole 200", "leave 200", "grammar 200", "embed 200", "wrong 400"} <= set(ends), (
        ends
    )
    assert stats["under_way"] == {"requests": 0, "tokens": 0}, stats
    assert (stats["engine"]["running"], stats["engine"]["waiting"], stats["engine"]["cache_usage"]) == (
        0,
        0,
        0,
    ), stats
    assert stats["engine"]["restarts"] == 0
    deadline = time.monotonic() + 15
    while (after := soaked.held()).handles > before.handles and time.monotonic() < deadline:
        time.sleep(0.2)  # a connection that the server is closing is still a handle for a moment
    assert after.tasks <= before.tasks, (before, after)
    assert after.processes == before.processes
    assert after.handles <= before.handles, (before, after)
    assert after.memory <= before.memory + GROWTH, (before, after)
    family = psutil.Process(soaked.process.process.pid).children(recursive=True)
    assert soaked.process.end() == 0
    assert not psutil.wait_procs(family, timeout=10)[1], "its child processes end with it"
