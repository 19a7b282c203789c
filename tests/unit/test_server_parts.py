"""Single parts of the server: child processes, the text engine over scripted tokens, priorities, traces."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nearfar.edge_runtime.artifact.variants import ProgramChoice
from nearfar.edge_runtime.engine.requests import Logprob
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.tools.asking import ToolChoice
from nearfar.errors import EngineError, OverloadError, RequestError
from nearfar.fallback_server.backend import (
    BackendEvent,
    BackendInfo,
    BackendStats,
    EmbedRequest,
    LabelScores,
    RunningProgram,
    Sampling,
    ScoreRequest,
    TokenRequest,
)
from nearfar.fallback_server.engines.artifact import ArtifactBackend
from nearfar.fallback_server.engines.base import EmbeddingVectors, EngineRequest
from nearfar.fallback_server.engines.local import LocalEngine, TextOptions, TextSource
from nearfar.fallback_server.engines.opening import guess
from nearfar.fallback_server.grammars import TokenConstraint
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.embedding import EmbeddingShape
from nearfar.fallback_server.http.logs import AuditLog
from nearfar.fallback_server.http.metrics import Metrics
from nearfar.fallback_server.http.tracing import Tracer
from nearfar.fallback_server.http.writing import written
from nearfar.fallback_server.sandbox import ChildPool, ChildSpec
from nearfar.format.sampling import SamplingDefaults
from nearfar.pooling import pooling_of
from tests.support import tiny
from tests.support.servers import tiny_core, tokenizer_directory

THINKING = tiny.TEMPLATE.replace("<|assistant|>'", "<|assistant|><think>\n'")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OPTIONS = TextOptions(template_timeout=20, text_processes=1)
TEXT_CHILD = "nearfar.fallback_server.sandbox.text_child"


class Scripted:
    """A backend with scripted answers, whose prompts have log-probabilities."""

    def __init__(self, directory: Path, text: str, *, error: Exception | None = None) -> None:
        self.info = BackendInfo("scripted", 261, 500, (257,), 4, 1000)
        self._tokens = TextCodec.open_directory(directory, 256).encode_raw(text)
        self._error = error
        self.requests: list[TokenRequest] = []

    def submit(self, request: TokenRequest) -> AsyncIterator[BackendEvent]:
        self.requests.append(request)
        return self._events(request)

    async def _events(self, request: TokenRequest) -> AsyncIterator[BackendEvent]:
        prompt = None
        if request.prompt_logprobs is not None:
            prompt = (
                None,
                *((Logprob(token, -0.5), (Logprob(token, -0.5),)) for token in request.tokens[1:]),
            )
        logprob = -0.25 if request.logprobs is not None else None
        for token in self._tokens:
            await asyncio.sleep(0)
            yield BackendEvent(token, None, logprob, (), prompt, 3 if prompt else 0)
            prompt = None
        if self._error is not None:
            raise self._error
        yield BackendEvent(257, "stop", logprob)

    async def cancel(self, request_id: str) -> None:
        raise NotImplementedError

    async def embed(self, request: EmbedRequest) -> list[float]:
        return [float(len(request.tokens))]

    async def score(self, request: ScoreRequest) -> LabelScores:
        return [(-0.5,) * len(label) for label in request.labels]

    def stats(self) -> BackendStats:
        return BackendStats(0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0)

    async def alive(self) -> bool:
        return True

    async def close(self, drain: float = 0.0) -> None:
        pass


async def answer(folder: Path, text: str, *, template: str = tiny.TEMPLATE, reasoning: str = "auto",
                 error: Exception | None = None, **request: Any) -> list[Piece]:  # fmt: skip
    directory = tokenizer_directory(folder / str(len(template)), template)
    options = replace(OPTIONS, reasoning=reasoning)
    engine = LocalEngine(Scripted(directory, text, error=error), TextSource(directory, 256), options)
    return await whole(engine, {"messages": ({"role": "user", "content": "x"},)} | request)


async def whole(engine: LocalEngine, given: dict[str, Any]) -> list[Piece]:
    try:
        answers = await engine.submit(await engine.prepare(EngineRequest("id", "scripted", **given)))
        try:
            return [piece async for piece in answers.pieces()]
        finally:
            await answers.aclose()
    finally:
        await engine.close()


def joined(pieces: Sequence[Piece]) -> tuple[str, str, list[str], str | None]:
    calls = [call.name for piece in pieces for call in piece.tool_calls if call.id]
    return "".join(p.reasoning for p in pieces), "".join(p.text for p in pieces), calls, pieces[-1].finish


async def test_reasoning_is_split_off_where_the_template_knows_it(tmp_path: Path) -> None:
    text = "hm, hm</think>\n\nyes"
    assert joined(await answer(tmp_path, text, template=THINKING)) == ("hm, hm", "yes", [], "stop")
    assert joined(await answer(tmp_path, text, template=THINKING, reasoning="off")) == ("", text, [], "stop")
    assert joined(await answer(tmp_path, text, template=THINKING, split_reasoning=False))[1] == text
    assert joined(await answer(tmp_path, "[a]b", reasoning="[,]")) == ("a", "b", [], "stop")
    with pytest.raises(RequestError, match="BEGIN,END"):
        await answer(tmp_path, "", reasoning="<think>")


async def test_calls_that_the_model_chose_to_make(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert joined(await answer(tmp_path, f"Well: {call}", tools=(TOOL,))) == (
        "",
        "Well: ",
        ["f"],
        "tool_calls",
    )
    broken = '<tool_call>{"name": </tool_call>'
    assert joined(await answer(tmp_path, broken, tools=(TOOL,))) == ("", broken, [], "stop")
    none = await answer(tmp_path, call, tools=(TOOL,), tool_choice=ToolChoice("none"))
    assert joined(none) == ("", call, [], "stop")


async def test_what_a_request_does_not_say_the_model_says(tmp_path: Path) -> None:
    backend = Scripted(tokenizer_directory(tmp_path, tiny.TEMPLATE), "yes")
    backend.info = replace(backend.info, sampling=SamplingDefaults(temperature=0.6, top_k=20))
    given = {"messages": ({"role": "user", "content": "x"},), "sampling": {"top_k": 0, "seed": 5}}
    await whole(LocalEngine(backend, TextSource(tmp_path, 256), OPTIONS), given)
    assert backend.requests[0].sampling == Sampling(temperature=0.6, top_k=0, seed=5)


async def test_stop_strings_echo_and_errors(tmp_path: Path) -> None:
    assert joined(await answer(tmp_path, "one two three", stop=("tw", "xx"))) == ("", "one ", [], "stop")
    pieces = await answer(tmp_path, "!", messages=(), prompts=("abc",), echo=True, logprobs=1)
    assert "".join(piece.text for piece in pieces) == "abc!"
    assert [len(piece.logprobs) for piece in pieces[:2]] == [3, 1]
    assert pieces[0].logprobs[1].logprob == -0.5
    with pytest.raises(EngineError, match="died"):
        await answer(tmp_path, "abc", error=EngineError("it died"))


async def test_a_child_that_takes_too_long_is_killed_and_the_next_job_is_done(tmp_path: Path) -> None:
    loop = (
        "{% for m in messages %}{% if m.content == 'loop' %}{% for i in range(99999) %}{% set x = "
        "range(99999) | list %}"
        "{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
    )
    directory = tokenizer_directory(tmp_path, loop)
    settings = {"directory": str(directory), "bos": 256, "answers": {}}
    pool = ChildPool(ChildSpec(TEXT_CHILD, settings, "template", timeout=0.5, waiting=2))

    def job(content: str, **variables: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return {
            "op": "chat",
            "messages": messages,
            "variables": variables,
            "continue_last": False,
            "begin_answer": True,
            "most": 99,
        }

    try:
        await pool.warm()
        hostile, healthy = await asyncio.gather(
            pool.run(job("loop")), pool.run(job("ab")), return_exceptions=True
        )
        assert isinstance(hostile, RequestError)
        assert "more than 0.5 seconds of processor time" in str(hostile)
        assert isinstance(healthy, dict)
        assert healthy["tail"] == "ab"
        assert len(healthy["tokens"]) == 2
        assert pool.kills == 1
        with pytest.raises(RequestError, match="surrogate"):
            await pool.run(job("\ud800"))
        # A machine that gives the child no processor time for a while does not make it reject the job.
        (process,) = [child._process for child in pool._children if child._process is not None]
        process.send_signal(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.7, process.send_signal, signal.SIGCONT)
        assert (await pool.run(job("ef")))["tail"] == "ef"
        assert pool.kills == 1
        # A variable named `messages` or `bos_token` does not replace the template's own one.
        assert (await pool.run(job("cd", messages="x", bos_token="y")))["tail"] == "cd"
        # a prompt that is too long gives its number of tokens, not their ids
        assert (await pool.run(job("x" * 100)))["tokens"] == 100
        waiting = [asyncio.create_task(pool.run(job("loop"))) for _ in range(4)]
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(error, OverloadError) for error in done) >= 1
        # A child that gets no processor time for too long is given up: the server is at fault, not the job.
        assert (await pool.run(job("ab")))["tail"] == "ab"
        patient = pool.spec
        pool.spec = replace(patient, patience=0.6)
        (process,) = [child._process for child in pool._children if child._process is not None]
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(OverloadError, match=r"too little processor time for 0\.6 seconds"):
            await pool.run(job("gh"))
        pool.spec = patient
        assert (await pool.run(job("gh")))["tail"] == "gh"
    finally:
        await pool.close()


async def test_a_job_waits_for_the_child_that_starts_and_starts_no_other(tmp_path: Path) -> None:
    loop = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"directory": str(tokenizer_directory(tmp_path, loop)), "bos": None, "answers": {}}
    pool = ChildPool(ChildSpec(TEXT_CHILD, settings, "template", 2, timeout=20))
    chat = {
        "messages": [{"role": "user", "content": "ab"}],
        "variables": {},
        "continue_last": False,
        "begin_answer": True,
        "most": 99,
    }
    try:
        warming = asyncio.create_task(pool.warm(1))
        await asyncio.sleep(0)  # lets the task begin
        answer = await pool.run({"op": "chat", **chat})
        await warming
        assert answer["tail"] == "ab"
        # Ctrl-C in the terminal is for the server alone, also while a child imports.
        (pid,) = [child._process.pid for child in pool._children if child._process is not None]
        assert os.getsid(pid) == pid
        # Two that import and load at once took three times as long as one.
        assert [child._process is not None for child in pool._children].count(True) == 1
    finally:
        await pool.close()


async def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    pool = ChildPool(
        ChildSpec(TEXT_CHILD, {"directory": str(tmp_path), "bos": None, "answers": {}}, "template")
    )
    with pytest.raises(EngineError, match=r"no tokenizer\.json"):
        await pool.warm()


async def test_who_waits_is_served_by_priority_and_nobody_waits_for_ever() -> None:
    core = tiny_core(slots=1)
    backend = ArtifactBackend(core, max_waiting=3)
    order: list[str] = []

    async def ask(name: str, priority: int) -> None:
        async for event in backend.submit(TokenRequest(name, (1, 2), 30, Sampling(0.0), priority=priority)):
            if event.finish is not None:
                order.append(name)

    tasks = [
        asyncio.create_task(ask(name, p))
        for name, p in (("first", 0), ("late", 5), ("soon", -5), ("middle", 0))
    ]
    await asyncio.sleep(0)
    with pytest.raises(OverloadError, match="waiting"):
        backend.submit(TokenRequest("more", (1,), 1))
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["first", "soon", "late"]
    assert (backend.stats().running, backend.stats().waiting) == (0, 0)
    await backend.close()


def test_an_artifacts_program_is_told_and_why_it_is_that_one() -> None:
    core = tiny_core()
    backend = ArtifactBackend(core)
    name = core.executor.program_name
    assert backend.stats().program == RunningProgram(core.executor.name, name, "", {}, 256, 256)
    core.choice = ProgramChoice(
        name, "timed", {name: {"decode": 0.004, "large": 0.08}, "other": {"decode": 0.005}}
    )
    told = asdict(backend.stats())["program"]
    assert (told["name"], told["why"]) == (name, "timed")
    assert told["seconds"] == {name: {"decode": 0.004, "large": 0.08}, "other": {"decode": 0.005}}
    text = Metrics(lambda: "m", backend.stats).text().decode()
    labels = f'device="{core.executor.name}",model_name="m",program="{name}",why="timed"'
    assert f"nearfar:program_info{{{labels}}} 1.0" in text


async def test_closing_an_engine_ends_what_is_left_with_an_error() -> None:
    backend = ArtifactBackend(tiny_core())
    events = backend.submit(TokenRequest("a", (1, 2), 900, Sampling(0.0)))
    await anext(events)
    start = time.monotonic()
    await backend.close(drain=0.05)
    assert time.monotonic() - start < 10
    with pytest.raises(EngineError, match="shutting down"):
        [event async for event in events]


def test_a_matcher_that_fails_or_gets_slow_ends_its_own_request() -> None:
    class Matcher:
        def __init__(self, work: float) -> None:
            self.work = work

        def is_terminated(self) -> bool:
            return False

        def fill_next_token_bitmask(self, row: Any) -> bool:
            row[:] = 1
            return True

        def accept_token(self, token: int) -> bool:
            end = time.thread_time() + self.work
            while time.thread_time() < end:
                pass
            if token == 9:
                raise RuntimeError("broken")
            return True

    quick = TokenConstraint(Matcher(0.0), 64, frozenset({0, 99}), 1)
    assert quick.allowed().tolist() == [0, 1]  # token 0 ends the answer, and is not allowed yet
    assert quick.accept(5)
    assert quick.allowed().tolist() == [1, 1]
    assert not quick.accept(9)
    slow = TokenConstraint(Matcher(TokenConstraint.STEP_SECONDS * 1.5), 64, frozenset(), 0)
    assert not slow.accept(1)


def test_what_a_model_is_guessed_to_be(tmp_path: Path) -> None:
    tiny.write_artifact(tmp_path / "out" / "cpu")
    assert guess([str(tmp_path / "out")]) == "artifact"
    assert guess([str(tmp_path / "out" / "cpu")]) == "artifact"
    assert guess(["http://a", "https://b"]) == "upstream"
    assert guess(["Qwen/Qwen3-0.6B"]) == guess([str(tmp_path)]) == "torch"


async def test_the_offsets_of_a_prompt_that_is_repeated(tmp_path: Path) -> None:
    directory = tokenizer_directory(tmp_path)
    engine = LocalEngine(Scripted(directory, "é!"), TextSource(directory, 256), OPTIONS)
    app = create_app(engine)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        body = {"model": "scripted", "prompt": [256, *engine.codec.encode_raw("日 a")], "logprobs": 0}
        made = (await http.post("/v1/completions", json={**body, "echo": True})).json()["choices"][0]
        ids = {**body, "echo": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
        with_ids = (await http.post("/v1/completions", json=ids)).json()["choices"][0]
    await engine.close()
    assert made["text"] == with_ids["text"] == "日 aé!"
    assert made["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 2, 3, 3, 4]
    assert with_ids["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 2, 3, 3, 4, 5]
    assert with_ids["prompt_token_ids"] == body["prompt"]
    names = [f"token_id:{token}" for token in (*with_ids["prompt_token_ids"], *with_ids["token_ids"])]
    assert with_ids["logprobs"]["tokens"] == names


@pytest.mark.parametrize("as_names", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_token_ids_of_prompt_and_answer(tmp_path: Path, path: str, as_names: bool) -> None:
    """Whole and streamed, with an entry of logprobs for each id, also for that of the end token."""
    chat = "chat" in path
    directory = tokenizer_directory(tmp_path)
    backend = Scripted(directory, "é!")
    engine = LocalEngine(backend, TextSource(directory, 256), OPTIONS)
    answer = [*engine.codec.encode_raw("é!"), 257]
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": ["Hi", "Ho"]}
    body = {
        "model": "scripted", "return_token_ids": True, "return_tokens_as_token_ids": as_names,
        "logprobs": True if chat else 0, **asked,
    }  # fmt: skip
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        made = (await http.post(path, json=body)).json()
        text = (await http.post(path, json={**body, "stream": True})).text
        plain = (await http.post(path, json={**asked, "stream": True})).text
    await engine.close()
    prompts = [list(request.tokens) for request in backend.requests[: len(made["choices"])]]
    assert [choice["token_ids"] for choice in made["choices"]] == [answer for _ in prompts]
    holders = [made] if chat else made["choices"]
    assert [holder["prompt_token_ids"] for holder in holders] == prompts

    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    streamed = [[one for chunk in chunks for one in chunk["choices"] if one["index"] == at] for at in (0, 1)]
    for choice, parts, prompt in zip(made["choices"], streamed, prompts, strict=False):
        assert [token for part in parts for token in part.get("token_ids", [])] == answer
        told = [holder.get("prompt_token_ids") for holder in (chunks if chat else parts)]
        assert told == [prompt, *(None for _ in told[1:])]
        for found in (choice, *(part for part in parts if part.get("logprobs"))):
            logprobs = found["logprobs"]
            names = [item["token"] for item in logprobs["content"]] if chat else logprobs["tokens"]
            assert len(names) == len(found["token_ids"])
            if as_names:
                assert names == [f"token_id:{token}" for token in found["token_ids"]]
    assert "token_ids" not in plain


async def test_figures_of_the_prefix_cache_count_what_was_computed() -> None:
    backend = ArtifactBackend(tiny_core(context=160))
    with pytest.raises(RequestError):
        backend.submit(TokenRequest("long", tuple(range(200)), 4))
    await backend.submit(TokenRequest("left", (1, 2, 3), 4)).aclose()  # type: ignore[attr-defined]
    assert backend.stats().prefix_queries == 0
    assert [event.token async for event in backend.submit(TokenRequest("a", (1, 2, 3), 1))]
    assert (backend.stats().prefix_queries, backend.stats().prompt_tokens) == (3, 3)
    await backend.close()


@pytest.mark.parametrize(
    ("modes", "pooled"),
    [(None, "model"), ({"pooling_mode_lasttoken": True}, "last"), ({"pooling_mode": "mean"}, "mean")],
)
async def test_embeddings_are_pooled_as_the_checkpoint_says(
    tmp_path: Path, modes: dict[str, Any] | None, pooled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tokenizer_directory(tmp_path)
    if modes is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling/config.json").write_text(json.dumps(modes))
        modules = [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
        (directory / "modules.json").write_text(json.dumps(modules))
    source = TextSource(directory, 256, pooling=pooling_of(directory))
    engine = LocalEngine(Scripted(directory, "a"), source, OPTIONS)
    prepared = await engine.prepare(EngineRequest("a", "scripted", prompts=((1, 2),), pooling="model"))
    await engine.close()
    assert prepared.request.pooling == pooled


async def test_the_audit_log_has_reasoning_and_calls(tmp_path: Path) -> None:
    directory = tokenizer_directory(tmp_path / "tokenizer", THINKING)
    said = 'why</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine = LocalEngine(Scripted(directory, said), TextSource(directory, 256), OPTIONS)
    audit = AuditLog(tmp_path / "audit.jsonl", True)
    app = create_app(engine, AppOptions(audit=audit))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        asked = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}
        assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
    await engine.close()
    audit.close()
    entry = json.loads((tmp_path / "audit.jsonl").read_text())
    assert entry["reasoning"] == ["why"]
    assert [call["function"]["name"] for call in entry["tool_calls"][0]] == ["f"]


async def test_traces_and_the_audit_log_with_text(tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    simple = pytest.importorskip("opentelemetry.sdk.trace.export")
    spans = export.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(simple.SimpleSpanProcessor(spans))
    directory = tokenizer_directory(tmp_path / "tokenizer")
    engine = LocalEngine(
        Scripted(directory, "fine"),
        TextSource(directory, 256),
        TextOptions(template_timeout=20, text_processes=1),
    )
    audit = AuditLog(tmp_path / "audit.jsonl", True)
    app = create_app(engine, AppOptions(tracer=Tracer(provider), audit=audit))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "How are you?"}]}
        made = await http.post("/v1/chat/completions", json=body, headers={"traceparent": parent})
        assert made.json()["choices"][0]["message"]["content"] == "fine"
    span = spans.get_finished_spans()[0]
    assert span.name == "chat scripted"
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1]
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert [event.name for event in span.events] == ["first token"]
    audit.flush()
    line = (tmp_path / "audit.jsonl").read_text()
    assert "How are you?" in line
    assert '"answer": ["fine"]' in line
    audit.close()
    await engine.close()


def test_vectors_that_are_no_numbers_are_an_error_and_not_half_an_answer() -> None:
    """Before the fix NaN and infinity counted as success, and then could not be written as JSON."""
    shape = EmbeddingShape("m")

    def vectors(*given: list[float]) -> list[list[float]]:
        found = EmbeddingVectors([np.array(vector, np.float32) for vector in given], len(given))
        return [item["embedding"] for item in json.loads("".join(written(shape.whole(found))))["data"]]

    assert vectors([3.0, 4.0]) == [pytest.approx([0.6, 0.8])]
    for value in (float("nan"), float("inf")):
        with pytest.raises(EngineError, match="NaN or infinite: run the model in a wider dtype"):
            vectors([1.0, 2.0], [value, 1.0])
