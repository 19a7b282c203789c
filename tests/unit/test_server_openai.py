"""The server over the tiny model, asked by the official openai client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.servers import MODEL, RunningServer, tiny_engine

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    made = RunningServer(lambda: tiny_engine(directory))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10, temperature=0)
    assert made.choices[0].message.content
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == made.choices[0].message.content
    print(made)
