"""One client's hang-ups, and the text of others: no process for templates and tokenizing may be lost."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.errors import EngineError
from nearfar.fallback_server.engines.local import LocalEngine, TextOptions
from nearfar.fallback_server.sandbox import ChildPool, ChildSpec
from tests.support.servers import MODEL, RunningServer, tiny_engine, tokenizer_directory

# A message "slow" takes about a third of a second, which is long enough to hang up meanwhile.
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'slow' %}{% for i in range(300) %}"
    "{% set x = range(30000) | list %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
)
CHAT = "/v1/chat/completions"


def _body(content: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2}


def _job(text: str) -> dict[str, Any]:
    return {"op": "encode", "text": text, "most": 99}


def _pids(pool: ChildPool) -> list[int]:
    return [child._process.pid for child in pool._children if child._process is not None]


def _until(true: Any) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def server(tmp_path: Path) -> Any:
    tokenizer_directory(tmp_path, TEMPLATE)
    text = TextOptions(template_timeout=20, text_processes=1)
    made = RunningServer(lambda: tiny_engine(tmp_path, options=text))
    yield made
    made.close()


def test_hang_ups_while_text_is_made_cost_no_process(server: RunningServer) -> None:
    """Before the fix each hang-up killed the process, and the next request waited for another to start."""
    engine = server.engine
    assert isinstance(engine, LocalEngine)
    pool, admission = engine.text, server.app.state.service.admission
    before = _pids(pool)
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            data = json.dumps(_body("slow")).encode()
            headers = ("host: a", "content-type: application/json", f"content-length: {len(data)}")
            head = "\r\n".join((f"POST {CHAT} HTTP/1.1", *headers, "", ""))
            client.sendall(head.encode() + data)
            _until(lambda: pool._under_way and not pool._free.qsize())
        _until(lambda: not admission.requests)
    with httpx.Client(base_url=server.address, timeout=60) as http:
        answered = http.post(CHAT, json=_body("a"))
    assert answered.status_code == 200
    assert answered.json()["usage"]["prompt_tokens"] == 1
    assert (_pids(pool), pool.kills) == (before, 0)


async def test_the_answer_of_an_abandoned_job_goes_to_nobody(tmp_path: Path) -> None:
    engine = await tiny_engine(tmp_path, options=TextOptions(template_timeout=20, text_processes=1))
    pool = engine.text
    before = _pids(pool)
    try:
        abandoned = [asyncio.create_task(pool.run(_job("x" * n))) for n in (9, 99)]
        while not pool._under_way:
            await asyncio.sleep(0)
        for task in abandoned:
            task.cancel()
        await asyncio.wait(abandoned)
        assert all(task.cancelled() for task in abandoned)
        answers = await asyncio.gather(*(pool.run(_job("y" * n)) for n in (1, 2, 3)))
        assert [len(answer["tokens"]) for answer in answers] == [1, 2, 3]
        assert (_pids(pool), pool.kills) == (before, 0)
    finally:
        await engine.close()


async def test_who_waits_for_a_process_when_all_are_ended_is_told_so() -> None:
    """Before the fix the waiting job took the place of an ended process, and started another one after the
    end.
    """
    spec = ChildSpec("nearfar.fallback_server.sandbox.text", {}, "chat template")
    pool = ChildPool(spec)
    child = pool._children[0]
    started = asyncio.Event()

    async def ready() -> None:
        started.set()
        await asyncio.sleep(60)

    child.ready = ready  # type: ignore[method-assign]
    jobs = [asyncio.create_task(pool.run({"op": "encode"})) for _ in range(3)]
    await started.wait()
    await pool.close()
    ended = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 10)
    assert [str(each) for each in ended] == ["the server is shutting down"] * 3
    assert {type(each) for each in ended} == {EngineError}
