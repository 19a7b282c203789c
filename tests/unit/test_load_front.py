"""One client of a front beside others: the effect of its requests on circuit breakers, and the cost of each
token.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nearfar.fallback_server.engines import upstream
from nearfar.fallback_server.engines.base import EngineRequest
from nearfar.fallback_server.engines.relay import prompt_text
from nearfar.remote.vectors import read_vectors
from tests.support.clouds import DONE, STREAM, Cloud, Json, chatting, event, listing, reply, said, usage
from tests.support.fronts import Fronts, opened_fronts

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@pytest.fixture
def fronts() -> Iterator[Fronts]:
    with opened_fronts() as made:
        yield made


def body(model: str = "m", **more: Any) -> Json:
    return {"model": model, "messages": [{"role": "user", "content": "Hello"}], **more}


def test_who_asks_for_several_answers_shuts_nobody_out(fronts: Any) -> None:
    """The upstream ignores `n`: before the fix three such requests opened its circuit, and
    everybody got 503.
    """
    seeds: list[int | None] = []

    def one(asked: Json) -> Iterator[bytes]:
        seeds.append(asked.get("seed"))
        yield STREAM + said(f"Answer {len(seeds)}.") + said(finish="stop") + usage(3, 2) + DONE

    with Cloud(chatting(completions=one)) as cloud:
        _, client = fronts(cloud)
        for number in range(4):
            answered = client.post(CHAT, json=body(n=3, seed=7))
            assert answered.status_code == 200, answered.text
            found = answered.json()
            texts = [choice["message"]["content"] for choice in found["choices"]]
            assert texts == [f"Answer {3 * number + at}." for at in (1, 2, 3)]
            assert [choice["finish_reason"] for choice in found["choices"]] == ["stop"] * 3
            assert found["usage"]["completion_tokens"] == 6
            assert found["usage"]["prompt_tokens"] == 3
        assert seeds[:3] == [7, 8, 9]
        assert client.post(CHAT, json=body()).status_code == 200
        assert client.get("/ready").status_code == 200


def test_several_prompts_of_which_one_is_answered(fronts: Any) -> None:
    prompts: list[Any] = []

    def first(asked: Json) -> Iterator[bytes]:
        prompts.append(asked["prompt"])
        text = b'data: {"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}\n\n'
        yield STREAM + text + DONE

    def answer(path: str, asked: Json) -> Iterator[bytes]:
        if path == COMPLETIONS:
            yield from first(asked)
        else:
            yield listing("m")

    with Cloud(answer) as cloud:
        _, client = fronts(cloud)
        answered = client.post(COMPLETIONS, json={"model": "m", "prompt": ["a", "b"], "n": 2})
        assert [choice["text"] for choice in answered.json()["choices"]] == ["x"] * 4
    assert prompts == [["a", "b"], "a", "b", "b"]


def test_each_model_has_its_own_figures_and_a_token_costs_no_list_of_models(fronts: Any) -> None:
    """Before the fix, with an upstream of 400 models tokens came at a fifth of the speed: the list was made
    again for each.
    """
    names = [f"m{number}" for number in range(50)]
    stream = STREAM + b"".join(said("x") for _ in range(40)) + said(finish="stop") + usage(3, 40) + DONE

    def answer(path: str, asked: Json) -> Iterator[bytes]:
        yield listing(*names) if path.endswith("models") else stream

    with Cloud(answer) as cloud:
        server, client = fronts(cloud)
        listed = server.engine.models
        asked = 0

        def counted() -> Any:
            nonlocal asked
            asked += 1
            return listed()

        server.engine.models = counted  # type: ignore[method-assign]
        assert client.post(CHAT, json=body("m7")).status_code == 200
        assert asked <= 2
        assert client.post(CHAT, json=body("other")).status_code == 404
        text = client.get("/metrics").text
    counts = {model: float(count) for model, count in re.findall(
        r'nearfar:requests_total\{model_name="(.*?)",outcome=".*?"\} (\S+)', text)}  # fmt: skip
    assert counts == {"m7": 1, "unknown": 1}
    assert 'nearfar:request_generation_tokens_count{model_name="m7"} 1.0' in text
    assert 'nearfar:request_generation_tokens_count{model_name="m0"} 0.0' in text


def test_prompts_that_are_asked_for_one_by_one_are_counted_together(fronts: Any) -> None:
    tokens = {"a": 1000, "b": 5}

    def answer(path: str, asked: Json) -> Iterator[bytes]:
        if path != COMPLETIONS:
            yield listing("m")
            return
        first = asked["prompt"][0] if isinstance(asked["prompt"], list) else asked["prompt"]
        text = b'data: {"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}\n\n'
        yield STREAM + text + usage(tokens[first], 1) + DONE

    with Cloud(answer) as cloud:
        _, client = fronts(cloud)
        found = client.post(COMPLETIONS, json={"model": "m", "prompt": ["a", "b"]}).json()
        assert [choice["text"] for choice in found["choices"]] == ["x", "x"]
        assert found["usage"]["prompt_tokens"] == 1005


def test_a_prompt_is_put_together_once_and_a_long_one_beside_the_loop(
    fronts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def counted(request: EngineRequest) -> str:
        threads.append(threading.get_ident())
        return prompt_text(request)

    monkeypatch.setattr(upstream, "prompt_text", counted)
    stream = STREAM + said("x") + said(finish="stop") + usage(3, 1) + DONE
    with Cloud(chatting(completions=lambda _: iter([stream]))) as cloud:
        server, client = fronts(cloud)
        loop = server.run(_thread)
        for words in ("Hello", "Hello " * 10_000):
            asked = body(messages=[{"role": "user", "content": words}])
            assert client.post(CHAT, json=asked).status_code == 200
    assert len(threads) == 2
    assert threads[0] == loop != threads[1]


async def _thread() -> int:
    return threading.get_ident()


PRIVATE = "the treasure lies under the oak"


@pytest.mark.parametrize(
    ("answer", "logged"),
    [
        (reply("500 Wrong", {"error": {"message": f"cannot answer {PRIVATE!r}"}}), "status 500"),
        (reply("503 Busy", PRIVATE), "status 503"),
        (STREAM + event({"error": {"message": PRIVATE, "type": PRIVATE}}), "it reported an error"),
        (STREAM + event({"error": {"message": PRIVATE, "code": 500}}), "status 500"),
        (STREAM + event({"choices": PRIVATE}), "its answer does not have the right shape"),
        (STREAM + event([PRIVATE]), "its answer does not have the right shape"),
        (b"HTTP/1.1 200 OK\r\n" + PRIVATE.encode() + b"\r\n\r\n", "the connection was cut"),
        (STREAM + said("x"), "the connection was cut"),
        (reply("502 Bad", "<html>" + PRIVATE), "a web page, so another kind of server is there"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logs_have_no_words_of_a_server_which_may_quote_a_prompt(
    answer: bytes, logged: str, fronts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "nearfar")
    with Cloud(chatting(completions=lambda _: iter([answer]))) as cloud:
        _, client = fronts(cloud)
        client.post(CHAT, json=body(stream=True))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("nearfar.")]
    assert any(cloud.address in line and logged in line for line in lines), lines
    assert PRIVATE not in "\n".join(lines)


def test_vectors_are_read_and_written_beside_the_event_loop(fronts: Any) -> None:
    """Before the fix 2,048 long vectors stopped all other answers for seconds, when they came and when they
    were sent.

    The unit is the time to read and write the same numbers as JSON.
    """
    data = [{"index": at, "embedding": [number / 7 + at for number in range(1024)]} for at in range(200)]
    unit = time.thread_time()
    text = json.dumps({"data": data, "usage": {"prompt_tokens": 9}})
    json.loads(text)
    unit = time.thread_time() - unit

    def answer(path: str, given: Json) -> Iterator[bytes]:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
        yield listing("m") if path != EMBEDDINGS else head + text.encode()

    with Cloud(answer) as cloud:
        server, client = fronts(cloud)
        before = server.loop_seconds
        answered = client.post(EMBEDDINGS, json={"model": "m", "input": ["x"] * 200})
        loop = server.loop_seconds - before
    found = answered.json()
    assert [each["index"] for each in found["data"]] == [*range(200)]
    assert found["data"][199]["embedding"] == pytest.approx(data[199]["embedding"])
    assert found["usage"]["prompt_tokens"] == 9
    assert loop < unit / 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"data": [{"index": 0, "embedding": [1, true]}]}',
        b'{"data": [{"index": 0, "embedding": [1, null]}]}',
        b'{"data": [{"index": 0, "embedding": [[1]]}]}',
        b'{"data": [{"index": 0, "embedding": 0}]}',
        b'{"data": [{"index": 0, "embedding": "AAAA"}]}',
        b'{"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": 0}]}',
        b'{"data": [{"index": 0, "embedding": [1]}], "embedding": [2]}',
        b'{"data": [{"index": 0, "embedding": [1,]}]}',
        b'{"data": [{"index": 0, "embedding": [1' + b"0" * 400 + b"]}]}",
        b'{"data": [{"embedding": [1]}]}',
        b'{"data": []}',
        b'{"data": 3}',
        b"[]",
        b"\xff",
    ],
)
def test_what_is_no_vectors(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):  # ShapeError is a ValueError
        read(body, 1)


def test_vectors_come_in_order_whatever_stands_beside_them() -> None:
    said = r'{"model": "a \"embedding\": [1]", "data": ['
    ends = '{"embedding" : [ 1e400, -2 ],"index":1},{"index":0,"embedding":[3.5,NaN]}], "usage": null}'
    with pytest.raises(ValueError, match="no embeddings"):
        read((said + ends).encode(), 2)
    vectors, tokens = read((said + ends.replace("null", "{}")).encode(), 2)
    assert [vector.tolist() for vector in vectors] == [
        [3.5, pytest.approx(math.nan, nan_ok=True)],
        [math.inf, -2],
    ]
    assert tokens == 0


def read(body: bytes, count: int) -> Any:
    steps = read_vectors(body, count)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def test_inputs_to_embed_go_to_servers_in_parts_with_the_fields_that_they_know(fronts: Any) -> None:
    """An answer with 2,048 vectors exceeds the limit of an answer; before the fix that opened the circuit for
    everybody.
    """
    asked: list[Json] = []

    def answer(path: str, given: Json) -> Iterator[bytes]:
        if path != "/v1/embeddings":
            yield listing("m")
            return
        asked.append(given)
        data = [{"index": at, "embedding": [float(text), 1.0]} for at, text in enumerate(given["input"])]
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
        yield head + json.dumps({"data": data, "usage": {"prompt_tokens": len(data)}}).encode()

    with Cloud(answer) as cloud:
        _, client = fronts(cloud)
        given = {"model": "m", "input": [str(at) for at in range(600)], "input_type": "query"}
        found = client.post("/v1/embeddings", json={**given, "encoding_format": "float"}).json()
        assert [each["embedding"][0] for each in found["data"]] == [float(at) for at in range(600)]
        assert found["usage"]["prompt_tokens"] == 600
        assert [len(each["input"]) for each in asked] == [256, 256, 88]
        assert {each["input_type"] for each in asked} == {"query"}
        assert not any("encoding_format" in each for each in asked)
