"""Hostile requests, and a rig that sends them beside healthy streams to a server over any engine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from nearfar.fallback_server.engines.base import ServerEngine
from nearfar.fallback_server.engines.local import LocalEngine, TextOptions, TextSource
from nearfar.fallback_server.engines.upstream import UpstreamEngine, UpstreamOptions
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.limits import ServerLimits
from tests.support.servers import MODEL, RunningServer, tiny_checkpoint, tiny_engine, tokenizer_directory

ENGINES = ("artifact", "torch", "upstream")
HEALTHY = 8
LENGTH = 80
SECONDS = 150
"""Time limit in seconds for hostile and healthy requests together; a quiet machine takes a tenth of it."""
MEGABYTES = 400
"""The most additional megabytes that the server and its engine may take at any time during an attack; child
processes that compile have limits of their own.
"""
LIMITS = ServerLimits(header_timeout=4.0, body_timeout=5.0, write_timeout=3.0, body_bytes=1 << 20)
# A loop that a user's message starts, with slow turns: the sandbox itself stops it only after many seconds.
TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% if m['content'] == 'loop' %}{% for i in range(90000) %}{% set x = range(90000) | list %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass
class Rig:
    """A server over an engine of one kind. `inner`: the upstream server, if there is one."""

    server: RunningServer
    inner: RunningServer | None = None
    expected: list[str] = field(default_factory=list)

    @property
    def engine(self) -> ServerEngine:
        """The engine that computes."""
        return (self.inner or self.server).engine

    def close(self) -> None:
        """Stop."""
        self.server.close()
        if self.inner is not None:
            self.inner.close()

    def processes(self) -> list[psutil.Process]:
        """The server's process, and the one in which its engine works."""
        worker = getattr(getattr(self.engine, "backend", None), "worker_pid", None)
        return [psutil.Process(), *([psutil.Process(worker)] if worker else [])]

    async def nothing_left(self) -> None:
        """Wait until nothing of any request is left."""
        for _ in range(1000):
            if not self._busy():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(
            f"left: {self.engine.stats()}, {self.server.app.state.service.admission.requests} requests"
        )

    def _busy(self) -> bool:
        stats, admission = self.engine.stats(), self.server.app.state.service.admission
        return bool(
            stats.running or stats.waiting or admission.requests or admission.tokens or stats.cache_usage
        )


def open_rig(kind: str, directory: Path, artifact: Rig | None = None) -> Rig:
    """Start a server over the tiny model with this kind of engine. `artifact`: the rig whose server an
    upstream engine calls, since another server would cost 5 CPU seconds.
    """
    text = TextOptions(template_timeout=1.0, text_processes=2)
    if kind == "torch":
        tiny_checkpoint(directory, TEMPLATE)
        rig = Rig(RunningServer(lambda: _torch(directory, text), AppOptions(LIMITS)))
    elif kind == "upstream":
        inner = (artifact or open_rig("artifact", directory)).server
        options = UpstreamOptions(probe_seconds=30)
        url = inner.address
        rig = Rig(RunningServer(lambda: UpstreamEngine.connect([url], options), AppOptions(LIMITS)), inner)
    else:
        tokenizer_directory(directory, TEMPLATE)
        made = RunningServer(lambda: tiny_engine(directory, options=text, grammar_timeout=2.0, slots=16),
                             AppOptions(LIMITS))  # fmt: skip
        rig = Rig(made)
    with httpx.Client(base_url=rig.server.address, timeout=60) as http:
        # Each prompt is answered alone, and one request has a grammar, so that the grammar's code is loaded.
        rig.expected = [
            http.post(COMPLETION, json=prompt(n)).json()["choices"][0]["text"] for n in range(HEALTHY)
        ]
        warm = completion(response_format={"type": "regex", "regex": "a"})
        assert http.post(COMPLETION, json=warm).status_code == 200
    return rig


async def _torch(directory: Path, text: TextOptions) -> LocalEngine:
    from nearfar.fallback_server.torch_engine.client import TorchBackend
    from nearfar.fallback_server.torch_engine.options import TorchOptions

    options = TorchOptions(
        name=MODEL,
        dtype="float32",
        threads=1,
        max_running=16,
        cache_bytes=8 << 20,
        grammar_seconds=2.0,
        native=False,
    )
    engine = LocalEngine(await TorchBackend.load(directory, options), TextSource(directory, 256), text)
    await engine.start()
    return engine


class MemoryWatch:
    """Measures the most memory that processes take while the block runs, beyond what they had before:
    `megabytes`.
    """

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self._before = self._held()
        self._most = self._before
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def megabytes(self) -> float:
        """The peak so far."""
        return (self._most - self._before) / 2**20

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _held(self) -> int:
        return sum(int(process.memory_info().rss) for process in self._processes)

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            self._most = max(self._most, self._held())


def prompt(number: int) -> dict[str, Any]:
    """A healthy request with a prompt of LENGTH tokens."""
    return {"model": MODEL, "prompt": f"Healthy request {number}", "max_tokens": LENGTH, "temperature": 0,
            "logit_bias": {"257": -100}}  # fmt: skip


async def _stream(http: httpx.AsyncClient, number: int) -> str:
    text = ""
    async with http.stream("POST", COMPLETION, json={**prompt(number), "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            if line == "data: [DONE]":
                return text
    raise AssertionError("the stream ended early")


@asynccontextmanager
async def healthy(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    """Run eight streams around the block and check them: right answers, in time, within memory, and no
    requests left afterwards.
    """
    async with (
        httpx.AsyncClient(base_url=rig.server.address, timeout=SECONDS) as http,
        asyncio.timeout(SECONDS),
    ):
        with MemoryWatch(rig.processes()) as watch:
            tasks = [asyncio.create_task(_stream(http, number)) for number in range(HEALTHY)]
            await asyncio.sleep(0.05)
            yield http
            assert await asyncio.gather(*tasks) == rig.expected
    assert watch.megabytes < MEGABYTES
    await rig.nothing_left()


def chat(**body: Any) -> dict[str, Any]:
    """A short chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **body}


def completion(**body: Any) -> dict[str, Any]:
    """A short completion."""
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 4, **body}


def nest(depth: int) -> dict[str, Any]:
    """A schema of nested objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def schema_format(schema: Any) -> dict[str, Any]:
    """Wrap a schema as a response_format."""
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


async def attack(http: httpx.AsyncClient, name: str) -> str | None:
    """Send one hostile request; gives what is wrong with its answer, or None."""
    path, body, allowed = HOSTILE[name]
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    start = time.monotonic()
    response = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    problem = response.json().get("error", {}) if response.status_code != 200 else None
    if response.status_code in allowed and (problem is None or problem.get("message")):
        return None
    return f"{name}: {response.status_code} after {time.monotonic() - start:.1f} s: {response.text[:200]}"


# Path, body (text is sent as it is), allowed statuses.
HOSTILE: dict[str, tuple[str, Any, set[int]]] = {
    "temperature negative": (CHAT, chat(temperature=-0.1), {400}),
    "temperature NaN": (
        CHAT,
        '{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        {400},
    ),
    "temperature 1e999": (
        CHAT,
        '{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
        {400},
    ),
    "temperature as text": (CHAT, chat(temperature="0.5"), {400}),
    "temperature tiny": (CHAT, chat(temperature=1e-300), {200}),
    "top_k above the vocabulary": (COMPLETION, completion(top_k=10**6), {200}),
    "top_p zero": (COMPLETION, completion(top_p=0), {400}),
    "token id out of the vocabulary": (COMPLETION, completion(prompt=[1, 99999]), {400}),
    "token id negative": (COMPLETION, completion(prompt=[-1]), {400}),
    "token id huge": (COMPLETION, completion(prompt=[2**70]), {400}),
    "bias out of the vocabulary": (COMPLETION, completion(logit_bias={"99999": 1}), {400}),
    "bias for everything": (COMPLETION, completion(logit_bias={str(n): -100 for n in range(261)}), {200}),
    "stop token out of the vocabulary": (COMPLETION, completion(stop_token_ids=[10**9]), {400}),
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
    "image URL": (
        CHAT,
        chat(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}],
                }
            ]
        ),
        {400},
    ),
    "unknown field": (CHAT, chat(chat_template="{{ 1 }}"), {400}),
    "unknown role": (CHAT, chat(messages=[{"role": "root", "content": "x"}]), {400}),
    "template variable that is not a scalar": (CHAT, chat(chat_template_kwargs={"x": {"y": 1}}), {400}),
    "template variable that overrides": (
        CHAT,
        chat(chat_template_kwargs={"messages": "x", "bos_token": "y"}),
        {200, 400},
    ),
    "template that loops": (CHAT, chat(messages=[{"role": "user", "content": "loop"}]), {400}),
    "arguments that are not JSON": (
        CHAT,
        chat(
            messages=[
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
                    ],
                }
            ]
        ),
        {200, 400},
    ),
    "enum of 30,000 numbers": (
        CHAT,
        chat(response_format=schema_format({"enum": list(range(30_000))})),
        {400},
    ),
    "enum of 6,000 numbers": (
        CHAT,
        chat(response_format=schema_format({"enum": list(range(6_000))})),
        {200, 400},
    ),
    "exponential regex": (
        CHAT,
        chat(response_format={"type": "regex", "regex": "((((a{1,99}){1,99}){1,99}){1,99})"}),
        {200, 400},
    ),
    "regex that slows down": (
        CHAT,
        chat(
            response_format={"type": "regex", "regex": "(a*)*" * 20 + "b"},
            max_tokens=900,
            logit_bias={"64": 100},
        ),
        {200, 400},
    ),
    "ambiguous regex": (CHAT, chat(response_format={"type": "regex", "regex": "(a|a)*" * 60}), {200, 400}),
    "endless grammar": (
        CHAT,
        chat(response_format={"type": "grammar", "grammar": "root ::= root"}),
        {200, 400},
    ),
    "grammar that is none": (
        CHAT,
        chat(response_format={"type": "grammar", "grammar": "root = \x00"}),
        {400},
    ),
    "schema that is none": (
        CHAT,
        chat(response_format=schema_format({"type": "unicorn", "$ref": "http://x/"})),
        {200, 400},
    ),
    "schema that refers to itself": (CHAT, chat(response_format=schema_format({"$ref": "#"})), {200, 400}),
    "schema whose keyword is not kept to": (
        CHAT,
        chat(response_format=schema_format({"type": "array", "uniqueItems": True})),
        {400},
    ),
    "schema of many alternatives": (
        CHAT,
        chat(
            response_format=schema_format(
                {"oneOf": [{"type": "object", "properties": {str(n): {}}} for n in range(1500)]}
            )
        ),
        {400},
    ),
    "pattern that looks back": (
        CHAT,
        chat(response_format=schema_format({"enum": ["a" * 40], "pattern": "(a+)+b"})),
        {400},
    ),
    "stream options without a stream": (CHAT, chat(stream_options={"include_usage": True}), {400}),
}
