"""Which requests a server admits: limits count existing tokens, not the possible lengths of answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from nearfar.edge_runtime.engine.requests import Logprob
from nearfar.errors import OverloadError
from nearfar.fallback_server.backend import BackendEvent, TokenRequest
from nearfar.fallback_server.engines.base import EngineRequest
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.limits import Admission, ServerLimits
from nearfar.fallback_server.tenants import ANONYMOUS
from nearfar.fallback_server.token_stream import BackendStream, TaskStreams, Unread
from nearfar.fallback_server.torch_engine.client import TokenStream
from tests.support.servers import MODEL, RunningServer, tiny_engine

PLAIN = BackendEvent(7)
RICH = BackendEvent(7, None, -0.5, tuple(Logprob(n, -1.0) for n in range(20)))


async def test_chats_without_a_bound_of_their_own_are_let_in_by_their_prompts(tmp_path: Path) -> None:
    """When each counted the whole context, the third was rejected although the engine was idle."""
    engine = await tiny_engine(tmp_path, context=1024)
    admission = Admission(ServerLimits(tokens=2048))
    try:
        for number in range(20):
            chat = ({"role": "user", "content": "Hello"},)
            request = EngineRequest(f"r{number}", MODEL, messages=chat, tenant=ANONYMOUS)
            ticket = await admission.enter(ANONYMOUS)
            ticket.admit()
            await ticket.charge(await engine.prepare(request))
        assert admission.tokens < 2048
    finally:
        await engine.close()


async def test_what_a_slow_reader_leaves_is_small_and_ends_the_slowest_first() -> None:
    unread = Unread(most=100_000)
    plain, rich, reading = (BackendStream(unread) for _ in range(3))
    for _ in range(20):
        plain.put(PLAIN)
        rich.put(RICH)
        reading.put(RICH)
        assert await anext(reading) == RICH
    assert reading.unread == 0
    assert 60 * plain.unread < 20 * rich.unread
    for _ in range(30):
        rich.put(RICH)
    assert unread.bytes == plain.unread < 1000
    with pytest.raises(OverloadError, match="reads too slowly"):
        await anext(rich)
    assert [await anext(plain) for _ in range(20)] == [PLAIN] * 20
    assert unread.bytes == 0


async def test_nothing_more_is_computed_for_a_stream_that_was_ended() -> None:
    streams = TaskStreams()
    streams.unread.most = 10_000
    made = 0

    async def work(stream: BackendStream) -> None:
        nonlocal made
        while True:
            made += 1
            stream.put(RICH)
            await asyncio.sleep(0)

    stream = streams.start("a", work)
    while len(streams):
        await asyncio.sleep(0)
    assert made == 4
    with pytest.raises(OverloadError, match="reads too slowly"):
        await anext(stream)
    left = streams.start("b", work)
    await left.aclose()
    assert streams.unread.bytes == 0


def test_a_whole_answer_with_many_alternatives_does_not_keep_a_word_out(tmp_path: Path) -> None:
    options = AppOptions(ServerLimits(tokens=400))
    server = RunningServer(lambda: tiny_engine(tmp_path), options)
    admission = server.app.state.service.admission
    body = {"model": MODEL, "prompt": "a", "logit_bias": {"257": -100}}
    try:
        with httpx.Client(base_url=server.address, timeout=60) as http:
            # Answers of other requests exceed the bound together.
            admission.tokens, admission.requests = 5000, 3
            assert http.post("/v1/completions", json={**body, "max_tokens": 2}).status_code == 200
            greedy = http.post("/v1/completions", json={**body, "max_tokens": 200, "logprobs": 20})
            assert greedy.status_code == 429
            assert "stream the answer" in greedy.json()["error"]["message"]
            assert (admission.tokens, admission.requests) == (5000, 3)
    finally:
        server.close()


async def test_an_answer_of_torch_that_is_whole_and_unread_can_still_be_ended() -> None:
    """Before the fix the answer's reader waited for ever: after the last event the stream accepted
    no error.
    """
    backend: Any = SimpleNamespace(unread=Unread(most=100_000), forget=lambda stream: None)
    stream = TokenStream(backend, TokenRequest("a", (1,), 9))
    stream.put(RICH)
    stream.put(replace(PLAIN, finish="stop"))
    stream.fail(OverloadError("this client reads too slowly"))
    async with asyncio.timeout(5):
        with pytest.raises(OverloadError, match="reads too slowly"):
            await anext(stream)
