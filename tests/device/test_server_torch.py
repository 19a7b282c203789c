"""The server over the torch engine: the same interface, and features that artifacts lack."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from nearfar.fallback_server.engines.local import TextOptions
from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
from tests.shared_data import shared_data
from tests.support.late import late
from tests.support.servers import RunningServer

openai = late("openai")

pytest.importorskip("nearfar.fallback_server.torch_engine.client", reason="the torch engine is not here")

MODEL = "classics-1M"
HELLO: list[Any] = [{"role": "user", "content": "Tell me about the fox."}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    path = str(shared_data("models", MODEL))
    options = EngineOptions(dtype="float32", threads=1, kv_memory="64MB",
                            text=replace(TextOptions(), text_processes=1, template_timeout=10))  # fmt: skip
    made = RunningServer(lambda: open_engine([path], "auto", options))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60)


def test_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    parts = [
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
    ]
    assert "".join(parts) == whole.choices[0].message.content


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    """Scoring a text in one pass gives the log-probabilities that its tokens had when they were generated."""
    base: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 1}
    made = client.completions.create(prompt="Once upon a time", max_tokens=6, **base).choices[0]
    whole = client.completions.create(
        prompt="Once upon a time" + made.text, echo=True, max_tokens=0, **base
    ).choices[0]
    assert whole.logprobs is not None
    assert made.logprobs is not None
    scored, generated = whole.logprobs.token_logprobs or [], made.logprobs.token_logprobs or []
    assert scored[0] is None
    assert scored[-len(generated) :] == pytest.approx(generated, abs=1e-3)


def test_token_ids(client: openai.OpenAI) -> None:
    """An answer to the prompt's token ids is the answer to its text; echo names the prompt's tokens by id."""
    ids: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    made: Any = client.completions.create(prompt="Once upon", echo=True, **asked, extra_body=ids).choices[0]
    again: Any = client.completions.create(prompt=made.prompt_token_ids, **asked, extra_body=ids).choices[0]
    assert (again.token_ids, again.prompt_token_ids) == (made.token_ids, made.prompt_token_ids)
    assert again.logprobs.tokens == [f"token_id:{token}" for token in made.token_ids]
    assert made.logprobs.tokens == [f"token_id:{t}" for t in (*made.prompt_token_ids, *made.token_ids)]
    assert [next(iter(top)) for top in again.logprobs.top_logprobs] == again.logprobs.tokens


def test_labels_have_the_log_probabilities_of_the_prompt_that_ends_in_them(
    client: openai.OpenAI, server: RunningServer
) -> None:
    """Labels scored after the cached prompt equal the last tokens of the whole text."""
    labels = [" a time", " the", " upon a midnight"]
    body = {"query": "Once upon " * 20, "items": [""], "labels": labels}
    (row,) = httpx.post(f"{server.address}/v1/score", json=body, timeout=60).json()["scores"]
    for label, found in zip(labels, row, strict=True):
        whole = client.completions.create(
            model=MODEL, prompt=body["query"] + label, echo=True, max_tokens=0, logprobs=0
        ).choices[0]
        assert whole.logprobs is not None
        offsets, told = whole.logprobs.text_offset or [], whole.logprobs.token_logprobs or []
        own = [value for at, value in zip(offsets, told, strict=True) if at >= len(body["query"])]
        assert math.log(found) == pytest.approx(sum(own), abs=1e-3)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_vectors_that_tell_texts_apart(client: openai.OpenAI, pooling: str) -> None:
    extra = {"pooling": pooling}
    made = client.embeddings.create(
        model=MODEL, input=["the cat", "the cat", "a storm at sea"], extra_body=extra
    )
    first, same, other = (item.embedding for item in made.data)
    assert first == pytest.approx(same, abs=1e-4)
    assert math.dist(first, other) > 0.1


def test_a_schema_is_kept_to(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"],
              "additionalProperties": False}  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}
    made = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=100, response_format=form, seed=1
    )
    assert json.loads(made.choices[0].message.content or "")["kind"] in ("cat", "dog")


def test_a_killed_engine_is_an_error_event(server: RunningServer, client: openai.OpenAI) -> None:
    """The client must not be left waiting; tests of the engine show that the engine comes back.

    This test kills the engine, so it is the file's last.
    """
    stream = client.completions.create(
        model=MODEL,
        prompt="Once",
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    engine: Any = server.engine
    os.kill(engine.backend.worker_pid, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        list(stream)
    assert httpx.get(f"{server.address}/health", timeout=10).status_code == 200
