"""Hostile requests and clients beside eight healthy streams, which must finish with the right tokens."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.fallback_server.engines.artifact import ArtifactBackend
from nearfar.fallback_server.engines.local import LocalEngine, TextOptions
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.limits import ServerLimits
from tests.support.servers import MODEL, RunningServer, tiny_engine

HEALTHY = 8
LENGTH = 80
LIMITS = ServerLimits(header_timeout=4.0, body_timeout=5.0, write_timeout=3.0, body_bytes=1 << 20)
# A loop that a user's message switches on, whose turns take long: the sandbox itself stops it only after many seconds.
TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% if m['content'] == 'loop' %}{% for i in range(90000) %}{% set x = range(90000) | list %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    options = TextOptions(template_timeout=1.0, text_processes=2)
    made = RunningServer(lambda: tiny_engine(directory, options=options, grammar_timeout=2.0, slots=16),
                         AppOptions(LIMITS))  # fmt: skip
    yield made
    made.close()


def prompt(number: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"Healthy request {number}", "max_tokens": LENGTH, "temperature": 0,
            "logit_bias": {"257": -100}}  # fmt: skip


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> list[str]:
    with httpx.Client(base_url=server.address, timeout=30) as http:
        return [http.post("/v1/completions", json=prompt(n)).json()["choices"][0]["text"] for n in range(HEALTHY)]


async def stream(http: httpx.AsyncClient, number: int) -> str:
    text = ""
    async with http.stream("POST", "/v1/completions", json={**prompt(number), "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            done = line == "data: [DONE]"
            if done:
                return text
    raise AssertionError("the stream ended early")


@asynccontextmanager
async def healthy(server: RunningServer, expected: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    """Eight streams around what happens in the block, and afterwards nothing is left of any of it."""
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as http:
        tasks = [asyncio.create_task(stream(http, number)) for number in range(HEALTHY)]
        await asyncio.sleep(0.05)
        yield http
        assert await asyncio.gather(*tasks) == expected
    await nothing_left(server)


async def nothing_left(server: RunningServer) -> None:
    def busy() -> bool:
        stats, admission = server.engine.stats(), server.app.state.service.admission
        return bool(stats.running or stats.waiting or admission.requests or admission.tokens or stats.cache_usage)

    for _ in range(500):
        if not busy():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"left: {server.engine.stats()}, {server.app.state.service.admission.requests} requests")


def chat(**body: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **body}


def completion(**body: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 4, **body}


def nest(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

# Path, body (text is sent as it is), allowed statuses.
HOSTILE: dict[str, tuple[str, Any, set[int]]] = {
    "temperature negative": (CHAT, chat(temperature=-0.1), {400}),
    "temperature NaN": (CHAT, '{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}', {400}),
    "temperature 1e999": (CHAT, '{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":1e999}', {400}),
    "temperature as text": (CHAT, chat(temperature="0.5"), {400}),
    "temperature tiny": (CHAT, chat(temperature=1e-300), {200}),
    "top_k above the vocabulary": (COMPLETION, completion(top_k=10**6), {200}),
    "top_p zero": (COMPLETION, completion(top_p=0), {400}),
    "token id out of the vocabulary": (COMPLETION, completion(prompt=[1, 99999]), {400}),
    "token id negative": (COMPLETION, completion(prompt=[-1]), {400}),
    "token id huge": (COMPLETION, completion(prompt=[2**70]), {400}),
    "bias out of the vocabulary": (COMPLETION, completion(logit_bias={"99999": 1}), {400}),
    "bias for everything": (COMPLETION, completion(logit_bias={str(n): -100 for n in range(261)}), {200}),
    "stop token out of the vocabulary": (COMPLETION, completion(stop_token_ids=[10**9]), {200}),
    "prompt longer than the context": (COMPLETION, completion(prompt="x" * 5000), {400}),
    "empty prompt of tokens": (COMPLETION, completion(prompt=[]), {400}),
    "empty messages": (CHAT, chat(messages=[]), {400}),
    "n of a million": (CHAT, chat(n=10**6), {400}),
    "10,000 stop strings": (CHAT, chat(stop=[str(n) for n in range(10_000)]), {400}),
    "empty stop string": (CHAT, chat(stop=""), {400}),
    "long stop string": (CHAT, chat(stop="x" * 10_000), {400}),
    "10,000 messages": (CHAT, chat(messages=[{"role": "user", "content": "x"}] * 10_000), {400}),
    "10,000 tools": (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}] * 10_000), {400}),
    "lone surrogate": (CHAT, '{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', {400}),
    "lone surrogate as a stop": (COMPLETION, '{"model":"tiny","prompt":"x","stop":"\\udfff"}', {400}),
    "not UTF-8": (CHAT, b'{"model":"\xff\xfe"}', {400}),
    "not JSON": (CHAT, "{", {400}),
    "a list": (CHAT, "[]", {400}),
    "nothing": (CHAT, "", {400}),
    "deep JSON": (CHAT, "[" * 100_000, {400}),
    "deep schema": (CHAT, chat(response_format=schema_format(nest(200))), {400}),
    "a number of 5,000 digits": (CHAT, '{"model":"tiny","seed":' + "9" * 5000 + "}", {400}),
    "image URL": (CHAT, chat(messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}]), {400}),
    "unknown field": (CHAT, chat(chat_template="{{ 1 }}"), {400}),
    "unknown role": (CHAT, chat(messages=[{"role": "root", "content": "x"}]), {400}),
    "template variable that is no scalar": (CHAT, chat(chat_template_kwargs={"x": {"y": 1}}), {400}),
    "template variable that overrides": (CHAT, chat(chat_template_kwargs={"messages": "x", "bos_token": "y"}), {200, 400}),
    "template that loops": (CHAT, chat(messages=[{"role": "user", "content": "loop"}]), {400}),
    "arguments that are no JSON": (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]), {200, 400}),
    "enum of 30,000 numbers": (CHAT, chat(response_format=schema_format({"enum": list(range(30_000))})), {400}),
    "enum of 6,000 numbers": (CHAT, chat(response_format=schema_format({"enum": list(range(6_000))})), {200, 400}),
    "exponential regex": (CHAT, chat(response_format={"type": "regex", "regex": "((((a{1,99}){1,99}){1,99}){1,99})"}),
                          {200, 400}),
    "regex that slows down": (CHAT, chat(response_format={"type": "regex", "regex": "(a*)*" * 20 + "b"},
                                         max_tokens=900, logit_bias={"64": 100}), {200, 400}),
    "ambiguous regex": (CHAT, chat(response_format={"type": "regex", "regex": "(a|a)*" * 60}), {200, 400}),
    "endless grammar": (CHAT, chat(response_format={"type": "grammar", "grammar": "root ::= root"}), {200, 400}),
    "grammar that is none": (CHAT, chat(response_format={"type": "grammar", "grammar": "root = \x00"}), {400}),
    "schema that is none": (CHAT, chat(response_format=schema_format({"type": "unicorn", "$ref": "http://x/"})), {200, 400}),
    "schema that refers to itself": (CHAT, chat(response_format=schema_format({"$ref": "#"})), {200, 400}),
    "stream options without a stream": (CHAT, chat(stream_options={"include_usage": True}), {400}),
}  # fmt: skip


async def test_hostile_requests_beside_healthy_streams(server: RunningServer, expected: list[str]) -> None:
    """Each gets its own status, all at once, several rounds of healthy streams long."""
    wrong = []

    async def attack(http: httpx.AsyncClient, name: str) -> None:
        path, body, allowed = HOSTILE[name]
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        response = await http.post(path, content=content, headers={"Content-Type": "application/json"})
        problem = response.json().get("error", {}) if response.status_code != 200 else None
        if response.status_code not in allowed or (problem is not None and not problem.get("message")):
            wrong.append((name, response.status_code, response.text[:200]))

    async with healthy(server, expected) as http:
        await asyncio.gather(*(attack(http, name) for name in HOSTILE))
    assert wrong == []


async def test_duplicate_ids_are_refused(server: RunningServer) -> None:
    """Ids are made by the server, so only a fault of its own could bring two."""
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
    await nothing_left(server)


def connect(server: RunningServer, receive_buffer: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(30)
    made.connect(("127.0.0.1", server.port))
    return made


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def closed_after(connection: socket.socket) -> float:
    """Seconds until the server closes the connection."""
    start = time.monotonic()
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{", b"HTTP/1.1 408"),
        (b"\x00\xff" * 50 + b"\r\n\r\n", b"HTTP/1.1 400"),
    ],
    ids=["nothing", "half of the headers", "half of the body", "noise"],
)
async def test_clients_that_stop_halfway(
    server: RunningServer, expected: list[str], sent: bytes, answer: bytes
) -> None:
    def halfway() -> bytes:
        with connect(server) as connection:
            connection.sendall(sent)
            got = b""
            while data := connection.recv(4096):
                got += data
            return got

    async with healthy(server, expected):
        try:
            async with asyncio.timeout(20):
                got = await asyncio.to_thread(halfway)
        except ConnectionResetError:
            got = b""
        assert got.startswith(answer)


async def test_a_client_that_vanishes(server: RunningServer, expected: list[str]) -> None:
    async with healthy(server, expected):
        for _ in range(4):
            connection = connect(server)
            connection.sendall(post(completion(max_tokens=900, stream=True, logit_bias={"257": -100})))
            await asyncio.to_thread(connection.recv, 100)
            # A reset, not a polite end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()


async def test_a_client_that_reads_one_byte_at_a_time(server: RunningServer, expected: list[str]) -> None:
    """Its window fills, the server stops writing, and after write_timeout the connection is cut and the work ends."""
    body = completion(max_tokens=900, n=4, stream=True, logprobs=20, logit_bias={"257": -100})
    with connect(server, receive_buffer=2048) as connection:
        port = connection.getsockname()[1]
        async with healthy(server, expected):
            connection.sendall(post(body))
            for _ in range(200):
                await asyncio.to_thread(connection.recv, 1)
                if not server.connected(port):
                    break
                await asyncio.sleep(0.1)
        assert not server.connected(port)
    async with asyncio.timeout(10):
        while server.engine.stats().running:
            await asyncio.sleep(0.05)


async def test_a_hung_engine_is_not_ready(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from nearfar.fallback_server.engines import artifact

    monkeypatch.setattr(artifact, "FRESH", 0.3)
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
        await asyncio.sleep(0.35)
        executor.run = slow
        try:
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
        finally:
            hung = False
            del executor.run
        await nothing_left(server)
        assert (await http.get("/ready")).status_code == 200


def footprint(server: RunningServer) -> dict[str, float]:
    """What must not grow with the number of requests."""

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
async def test_after_many_requests_everything_is_back_where_it_was(server: RunningServer) -> None:
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
        await nothing_left(server)
        for _ in range(100):  # the server sees the closed connections a little later
            if not server.connections:
                break
            await asyncio.sleep(0.02)
        return footprint(server)

    before = await many(20)
    after = await many(60)
    assert after == before
    assert before["calls"] == before["streams"] == 0
