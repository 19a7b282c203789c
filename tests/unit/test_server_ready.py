"""The answer of /ready of a front whose upstream servers are absent or fail."""

from __future__ import annotations

from pathlib import Path

import httpx

from nearfar.fallback_server.engines.upstream import UpstreamEngine, UpstreamOptions
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.remote.server import CHAT, COMPLETIONS
from tests.support.servers import RunningServer, tiny_engine


async def told_by_ready(engine: UpstreamEngine, keys: KeyStore | None = None, **headers: str) -> str:
    """The answer of /ready, as a client of the app gets it."""
    app = httpx.ASGITransport(create_app(engine, AppOptions(keys=keys)))
    async with httpx.AsyncClient(transport=app, base_url="http://front") as http:
        answer = await http.get("/ready", headers=headers)
    assert answer.status_code == 503
    return str(answer.json()["status"])


async def test_ready_says_which_upstream_is_not_there_and_why(tmp_path: Path) -> None:
    engine = await UpstreamEngine.connect(
        ["http://user:secret@127.0.0.1:1/v1/", "http://127.0.0.1:2"], UpstreamOptions(connect_timeout=1)
    )
    said = "no upstream server lists a model"
    told = await told_by_ready(engine)
    assert told == f"{said}: http://127.0.0.1:1 (connection refused), http://127.0.0.1:2 (connection refused)"
    # With keys the front may be open to everybody, so its upstreams' addresses are not shown.
    add_key(tmp_path / "keys.toml", Key("alice", hashed("a")))
    add_key(tmp_path / "keys.toml", Key("root", hashed("r"), admin=True))
    keys = KeyStore(tmp_path / "keys.toml")
    for headers in ({}, {"Authorization": "Bearer a"}, {"Authorization": "Bearer x"}):
        told = await told_by_ready(engine, keys, **headers)
        assert told == f"{said}; the server's log says which and why, and so does /ready with an admin key"
    told = await told_by_ready(engine, keys, Authorization="Bearer r")
    assert "127.0.0.1:1 (connection refused)" in told
    await engine.close()


async def test_ready_says_that_requests_to_an_upstream_fail(tmp_path: Path) -> None:
    inner = RunningServer(lambda: tiny_engine(tmp_path))
    engine = await UpstreamEngine.connect([inner.address], UpstreamOptions(failures=1))
    address = engine.book.addresses[0]
    for path in (CHAT, COMPLETIONS):
        address.breaker(path).failure(address.clock(), "request")
    told = await told_by_ready(engine)
    assert told == f"no upstream server answers: {inner.address} (its last requests failed)"
    await engine.close()
    inner.close()
