"""The server in front of upstreams that fail, lack features, are late or hostile, as its own
clients see it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.fallback_server.engines.base import EngineRequest
from nearfar.fallback_server.engines.upstream import UpstreamEngine, UpstreamOptions
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.fallback_server.tenants import Tenant
from tests.support.clouds import (
    CHUNKED,
    DONE,
    STREAM,
    Answer,
    Cloud,
    Json,
    chatting,
    chunk,
    event,
    free_port,
    listing,
    reply,
    said,
    usage,
)
from tests.support.servers import RunningServer

OPTIONS = UpstreamOptions(key="inner", continues=True, probe_seconds=60)
CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
EMBED: Json = {"model": "m", "input": "Hello"}


class Front:
    """A server in front of addresses, and a client of it."""

    def __init__(self, urls: list[str], options: UpstreamOptions) -> None:
        self.server = RunningServer(lambda: UpstreamEngine.connect(urls, options))
        self.http = httpx.Client(base_url=self.server.address, timeout=60)

    def chat(self, **more: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={**CHAT, **more})

    def text(self, **more: Any) -> str:
        answer = self.chat(**more)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def streamed(self, **more: Any) -> list[Json]:
        answer = self.chat(stream=True, stream_options={"include_usage": True}, **more)
        datas = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(data) for data in datas if data != "[DONE]"]

    def embed(self) -> httpx.Response:
        return self.http.post("/v1/embeddings", json=EMBED)

    def becomes_ready(self) -> bool:
        for _ in range(600):
            if self.http.get("/ready").status_code == 200:
                return True
            time.sleep(0.05)
        return False


Make = Callable[..., tuple[Front, list[Cloud]]]


@pytest.fixture
def made() -> Iterator[Make]:
    """A function that makes clouds with these answers, and a front before them."""
    with ExitStack() as stack:

        def make(*answers: Answer, options: UpstreamOptions = OPTIONS) -> tuple[Front, list[Cloud]]:
            clouds = [stack.enter_context(Cloud(answer)) for answer in answers]
            front = Front([cloud.address for cloud in clouds], options)
            stack.callback(front.server.close)
            return front, clouds

        yield make


def always(data: bytes) -> Callable[[Json], Iterable[bytes]]:
    return lambda body: [data]


def refuses(status: str) -> Callable[[Json], Iterable[bytes]]:
    return always(reply(status, {"error": {"message": "no, says 10.1.2.3:8000"}}))


@pytest.mark.parametrize(
    "status", ["501 Not Implemented", "404 Not Found", "401 Unauthorized", "403 Forbidden", "500 Oops"]
)
def test_embeddings_that_nobody_has_do_not_shut_the_chat_off(made: Make, status: str) -> None:
    front, clouds = made(*[chatting(embeddings=refuses(status))] * 2)
    for _ in range(5):
        answer = front.embed()
        assert answer.status_code == (400 if status[:3] in ("404", "501") else 503)
    assert front.text() == "Hi."
    assert front.http.get("/ready").status_code == 200
    asked = len(clouds[0].posts("/v1/embeddings")) + len(clouds[1].posts("/v1/embeddings"))
    assert asked == (6 if status == "500 Oops" else 10), "what fails is left alone, what refuses is not down"


def test_a_key_that_is_refused_for_a_while_opens_no_circuit(made: Make) -> None:
    wrong = True

    def chat(body: Json) -> Iterator[bytes]:
        yield (
            reply("401 Unauthorized", {"error": {"message": "no such key"}})
            if wrong
            else STREAM + said("Hi.", "stop") + DONE
        )

    front, _ = made(chatting(completions=chat))
    for _ in range(5):
        assert front.chat().status_code == 503
    wrong = False
    assert front.text() == "Hi."


async def test_a_server_that_is_listed_twice_at_once_is_asked_for_its_description_once() -> None:
    """A probe may begin while the one before waits for its answer: on a busy machine, or of a slow server."""
    with Cloud(chatting()) as cloud:
        engine = UpstreamEngine([cloud.address], OPTIONS)
        assert all(await asyncio.gather(engine._list(), engine._list()))
        await engine.close()
    paths = sorted(path for path, _ in cloud.asked)
    assert paths == ["/openapi.json", "/v1/models", "/v1/models"]


def test_a_quiet_server_is_asked_for_its_models_only(made: Make) -> None:
    _, (cloud,) = made(chatting(), options=replace(OPTIONS, probe_seconds=0.02))
    for _ in range(600):
        if len(cloud.asked) >= 4:
            break
        time.sleep(0.05)
    paths = [path for path, _ in cloud.asked]
    assert set(paths) == {"/v1/models", "/openapi.json"}
    assert paths.count("/openapi.json") == 1, "its description is read again only when its models change"
    assert len(paths) >= 4


def test_a_slow_first_token_is_waited_for_and_asked_for_once(made: Make) -> None:
    """The time between two tokens is 0, so the first token takes longer than that."""

    def slow(body: Json) -> Iterator[bytes]:
        time.sleep(0.1)
        yield STREAM
        time.sleep(0.1)  # so that the head comes without the token
        yield said("Hi.", "stop") + DONE

    front, clouds = made(*[chatting(completions=slow)] * 2, options=replace(OPTIONS, between_timeout=0.0))
    assert front.text() == "Hi."
    assert sum(len(cloud.posts()) for cloud in clouds) == 1


def test_comments_keep_a_connection_but_are_no_tokens(made: Make) -> None:
    def chatter(body: Json) -> Iterator[bytes]:
        yield STREAM
        for _ in range(600):
            yield b": keep-alive\n\n" + event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            time.sleep(0.05)

    def between(body: Json) -> Iterator[bytes]:
        yield STREAM + b": hello\r\n\r\nevent: message\r\nid: 7\r\n"
        yield said("H") + b":\n\n: ping\n" + said("i.") + b"retry: 10\n\n" + said(finish="stop") + DONE

    options = replace(OPTIONS, attempts=1, first_token_timeout=0.5, between_timeout=30.0)
    front, (cloud,) = made(chatting(completions=chatter), options=options)
    start = time.monotonic()
    assert front.chat().status_code == 503
    assert time.monotonic() - start < 15
    assert len(cloud.posts()) == 1
    other, _ = made(chatting(completions=between))
    assert other.text() == "Hi."


@pytest.mark.parametrize(
    "after", [b"", event({"error": {"message": "gone"}}), b"data: {not json\n\n", b"\xff\xfe"]
)
def test_a_cut_after_the_end_is_the_end(made: Make, after: bytes) -> None:
    whole = CHUNKED + chunk(said("The answer is 42.")) + chunk(said(finish="stop") + after)
    front, clouds = made(*[chatting(completions=always(whole))] * 2)
    events = front.streamed()
    assert not [record for record in events if "error" in record]
    assert (
        "".join(c["delta"].get("content") or "" for record in events for c in record["choices"])
        == "The answer is 42."
    )
    assert front.text() == "The answer is 42."
    assert sum(len(cloud.posts()) for cloud in clouds) == 2


@pytest.mark.parametrize("failing", ["refused", "500", "garbage", "429", "event", "cut"])
def test_clients_learn_nothing_of_addresses(
    made: Make, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "10.1.2.3"
    busy = reply("429 Too Many", {"error": {"message": f"org-x at {secret} has enough"}}, "Retry-After: 7")
    answers: dict[str, Callable[[Json], Iterable[bytes]]] = {
        "refused": refuses("401 Unauthorized"),
        "500": refuses("500 Oops"),
        "garbage": always(f"{secret} is not HTTP\r\n\r\n".encode()),
        "429": always(busy),
        "event": always(STREAM + event({"error": {"message": f"{secret} failed"}})),
        "cut": always(STREAM),
    }
    front, clouds = made(*[chatting(completions=answers[failing], embeddings=answers[failing])] * 2)
    for answer in (front.chat(), front.chat(stream=True), front.embed()):
        assert answer.status_code == (429 if failing == "429" else 503)
        told = answer.json()["error"]["message"]
        assert "no upstream server is available" in told or failing == "429"
        assert secret not in answer.text
        assert not any(str(cloud.port) in answer.text for cloud in clouds)
    assert secret not in caplog.text, "an upstream's words may quote what a user wrote"
    assert clouds[0].address in caplog.text


def test_an_error_in_mid_stream_names_no_address(made: Make) -> None:
    front, (cloud,) = made(
        chatting(completions=always(STREAM + said("Hi") + event({"error": {"message": "10.1.2.3 failed"}}))),
        options=replace(OPTIONS, continues=False),
    )
    events = front.streamed()
    assert events[-1]["error"]["message"] == "the upstream server failed during the answer"
    assert str(cloud.port) not in json.dumps(events)
    assert "10.1.2.3" not in json.dumps(events)


def test_a_thought_is_not_begun_again_elsewhere(made: Make) -> None:
    """The other server would get only the text, and would think again."""
    cut = CHUNKED + chunk(said(reasoning_content="Let me see. ")) + chunk(said("The"))
    front, clouds = made(*[chatting(completions=always(cut))] * 2)
    events = front.streamed()
    assert "during the answer" in events[-1]["error"]["message"]
    assert sum(len(cloud.posts()) for cloud in clouds) == 1


@pytest.mark.parametrize("told", ["usage", "token_ids"])
def test_a_continued_answer_has_the_tokens_that_were_left(made: Make, told: str) -> None:
    """Chunks have several tokens: the second server may use the tokens that the first has left, by the first
    server's own count.
    """

    def cut(body: Json) -> Iterator[bytes]:
        for number, text in enumerate(["One two ", "three "]):
            record: Json = {"choices": [{"index": 0, "delta": {"content": text}}]}
            if told == "usage":
                record["usage"] = {"prompt_tokens": 9, "completion_tokens": 10 * (number + 1)}
            else:
                record["choices"][0]["token_ids"] = list(range(10))
            yield (b"" if number else CHUNKED) + chunk(event(record))

    def rest(body: Json) -> Iterator[bytes]:
        yield STREAM + said("four.") + said(finish="stop") + usage(29, 4) + DONE

    def either(body: Json) -> Iterable[bytes]:
        return rest(body) if body.get("continue_final_message") else cut(body)

    front, clouds = made(*[chatting(completions=either)] * 2)
    answer = front.chat(max_tokens=50).json()
    assert answer["choices"][0]["message"]["content"] == "One two three four."
    (second,) = [body for cloud in clouds for body in cloud.posts() if body.get("continue_final_message")]
    assert second["messages"][-1] == {"role": "assistant", "content": "One two three "}
    assert second["max_tokens"] == 30
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (9, 24)


def test_a_server_that_refuses_to_go_on_is_no_fault_of_the_client(made: Make) -> None:
    def either(body: Json) -> Iterator[bytes]:
        if body.get("continue_final_message"):
            yield reply(
                "400 Bad Request", {"error": {"message": "continue_final_message: 10.1.2.3 knows it not"}}
            )
        else:
            yield CHUNKED + chunk(said("Hi"))

    front, _ = made(*[chatting(completions=either)] * 2)
    error = front.streamed()[-1]["error"]
    assert (error["message"], error["type"]) == (
        "the upstream server failed during the answer",
        "server_error",
    )


def test_an_answer_whose_end_only_was_lost_is_whole(made: Make) -> None:
    cut = CHUNKED + b"".join(chunk(said(letter)) for letter in "abcd")
    front, clouds = made(*[chatting(completions=always(cut))] * 2)
    answer = front.chat(max_tokens=4).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("abcd", "length")
    assert sum(len(cloud.posts()) for cloud in clouds) == 1


def test_a_front_starts_before_its_servers_and_finds_them() -> None:
    port = free_port()
    front = Front([f"http://127.0.0.1:{port}"], replace(OPTIONS, probe_seconds=0.1))
    try:
        assert front.http.get("/health").status_code == 200
        assert front.http.get("/ready").status_code == 503
        assert front.http.get("/v1/models").json()["data"] == []
        answer = front.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        with Cloud(chatting(), port):
            assert front.becomes_ready()
            assert [model["id"] for model in front.http.get("/v1/models").json()["data"]] == ["m"]
            assert front.text() == "Hi."
            shown = front.http.get("/metrics").text
            assert 'requests_total{model_name="m",outcome="ok"} 1.0' in shown, (
                "the label is known with the model"
            )
    finally:
        front.server.close()


def test_a_request_goes_to_an_address_that_serves_its_model(made: Make) -> None:
    front, clouds = made(*(chatting(f"I am {name}.", model=name) for name in "ab"))
    assert [model["id"] for model in front.http.get("/v1/models").json()["data"]] == ["a", "b"]
    for name in "abbaab":
        assert front.text(model=name) == f"I am {name}."
    assert [{body["model"] for body in cloud.posts()} for cloud in clouds] == [{"a"}, {"b"}]
    assert front.chat(model="c").status_code == 404
    # A server that is gone does not affect the other one.
    clouds[0].__exit__()
    assert front.chat(model="a").status_code == 503
    assert front.text(model="b") == "I am b."


def test_a_named_model_is_one_model(made: Make) -> None:
    with Cloud(chatting("I am a.", model="a")) as a, Cloud(chatting("I am b.", model="b")) as b:
        server = RunningServer(
            lambda: UpstreamEngine.connect([a.address, b.address], OPTIONS, ("front", "gpt"))
        )
        try:
            for name in ("front", "gpt", "front"):
                answer = httpx.post(
                    f"{server.address}/v1/chat/completions", json={**CHAT, "model": name}, timeout=30
                )
                assert answer.json()["choices"][0]["message"]["content"] == "I am a."
            assert b.posts() == []
        finally:
            server.close()


async def test_a_reader_who_is_slow_costs_the_upstream_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wait for a token counts, not the time that its reader takes between two tokens."""
    read, passed = threading.Event(), 0.0
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + passed)

    def steady(body: Json) -> Iterator[bytes]:
        yield STREAM + said("a")
        assert read.wait(60)
        yield said("b") + said(finish="stop") + DONE

    with Cloud(chatting(completions=steady)) as cloud:
        options = replace(OPTIONS, between_timeout=60.0, continues=False, probe_seconds=1e6)
        engine = await UpstreamEngine.connect([cloud.address], options)
        wanted = EngineRequest("1", "m", messages=tuple(CHAT["messages"]), body=CHAT)
        relay = await engine.submit(await engine.prepare(wanted))
        text = ""
        async for piece in relay.pieces():
            text += piece.text
            passed += 3600  # the loop's clock has advanced by an hour
            await asyncio.sleep(0)
            read.set()
        assert text == "ab"
        await relay.aclose()
        await engine.close()


def endless(head: bytes, part: bytes) -> Callable[[Json], Iterable[bytes]]:
    """An endless body, which stops at 400 MB."""

    def answer(body: Json) -> Iterator[bytes]:
        yield head
        for _ in range(400):
            yield part * (1_000_000 // len(part))

    return answer


@pytest.mark.parametrize("kind", ["error", "line", "event", "bomb"])
def test_what_has_no_end_is_not_read_to_it(made: Make, kind: str) -> None:
    head = {
        "error": b"HTTP/1.1 500 Oops\r\nConnection: close\r\n\r\n",
        "line": STREAM + b"data: ",
        "event": STREAM,
        "bomb": b"HTTP/1.1 400 Bad\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n",
    }
    part = b"data: x\n" if kind == "event" else b"x"
    sent = 0

    def counted(body: Json) -> Iterator[bytes]:
        nonlocal sent
        for data in endless(head[kind], part)(body):
            yield data
            sent += len(data)

    front, _ = made(chatting(completions=counted), options=replace(OPTIONS, attempts=1))
    assert front.chat().status_code in (400, 503)
    assert sent < 40_000_000
    small, _ = made(chatting(models=endless(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"x")))
    assert small.http.get("/ready").status_code == 503


async def test_the_salt_of_a_tenant_goes_along() -> None:
    """A tenant must not learn from the upstream's cache what another one asked."""
    with Cloud(chatting()) as cloud:
        for options in (OPTIONS, replace(OPTIONS, salts=False)):
            engine = await UpstreamEngine.connect([cloud.address], options)
            for tenant in (Tenant("alice", "salt of alice"), Tenant("nobody")):
                body = {**CHAT, "cache_salt": "mine", "user": "u"}
                wanted = EngineRequest("1", "m", messages=tuple(CHAT["messages"]), body=body, tenant=tenant)
                relay = await engine.submit(await engine.prepare(wanted))
                assert [piece.text async for piece in relay.pieces()] == ["Hi.", ""]
                await relay.aclose()
            await engine.close()
        assert [body.get("cache_salt") for body in cloud.posts()] == ["salt of alice", None, None, None]
        assert "user" not in cloud.posts()[0]


def test_each_key_has_a_cache_of_its_own_upstream(tmp_path: Path) -> None:
    for name in ("alice", "bob"):
        add_key(tmp_path / "keys.json", Key(name, hashed(name)))
    with Cloud(chatting()) as cloud:
        options = AppOptions(keys=KeyStore(tmp_path / "keys.json"))
        server = RunningServer(lambda: UpstreamEngine.connect([cloud.address], OPTIONS), options)
        try:
            for name in ("alice", "bob", "alice"):
                headers = {"Authorization": f"Bearer {name}"}
                assert (
                    httpx.post(
                        f"{server.address}/v1/chat/completions", json=CHAT, headers=headers, timeout=30
                    ).status_code
                    == 200
                )
        finally:
            server.close()
        first, second, third = (body["cache_salt"] for body in cloud.posts())
        assert first == third != second
        assert "alice" not in first


def test_listing_is_read_strictly(made: Make) -> None:
    front, _ = made(
        chatting(models=always(reply("200 OK", {"data": [{"id": 7}]}))),
        chatting(models=always(reply("200 OK", "[" * 100_000))),
        chatting(models=always(listing("m"))),
    )
    assert front.text() == "Hi."
