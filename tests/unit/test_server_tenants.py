"""Tenants of one server: requests of one tenant are invisible to others, and are not charged to them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.fallback_server.engines.base import EngineRequest, Prepared, ServerEngine
from nearfar.fallback_server.engines.local import TextOptions
from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
from nearfar.fallback_server.http import keys as keys_module
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.counts import OwnCounts
from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed, new_secret
from nearfar.fallback_server.http.limits import Admission, ServerLimits, answer_weight
from nearfar.fallback_server.http.logs import AuditLog
from nearfar.fallback_server.tenants import ANONYMOUS, Shares, Tenant, digest
from tests.shared_data import shared_data
from tests.support.servers import MODEL, RunningServer, tiny_engine

KEYS = (
    Key("alice"),
    Key("bob"),
    Key("carol", cache_group="team"),
    Key("dan", cache_group="team"),
    Key("urgent", priority=-10),
    Key("one", concurrent=1),
    Key("poor", tokens_per_minute=40),
    Key("root", admin=True),
)
ENDLESS = {"257": -100}


class House:
    """A server with tenants."""

    def __init__(self, folder: Path, model: str, make: Callable[[], Any]) -> None:
        self.model, self.file, self.audit = model, folder / "keys.toml", folder / "audit.jsonl"
        self.secrets: dict[str, str] = {}
        for key in KEYS:
            self.secrets[key.name] = secret = new_secret()
            add_key(self.file, replace(key, hash=hashed(secret)))
        options = AppOptions(ServerLimits(), KeyStore(self.file), AuditLog(self.audit, False))
        self.server = RunningServer(make, options)

    @property
    def service(self) -> Any:
        return self.server.app.state.service

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[name]}"}

    def http(self, name: str) -> httpx.Client:
        return httpx.Client(base_url=self.server.address, headers=self.headers(name), timeout=60)

    def complete(self, name: str, prompt: str, **body: Any) -> httpx.Response:
        with self.http(name) as http:
            return http.post(
                "/v1/completions", json={"model": self.model, "prompt": prompt, "max_tokens": 2, **body}
            )

    def embed(self, name: str, texts: str | list[str]) -> httpx.Response:
        with self.http(name) as http:
            return http.post("/v1/embeddings", json={"model": self.model, "input": texts})

    def cached(self, name: str, prompt: str, **body: Any) -> int:
        """Tokens of the prompt that the server reports as cached."""
        response = self.complete(name, prompt, **body)
        assert response.status_code == 200, response.text
        found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    def endless(self, prompt: str = "Hi") -> dict[str, Any]:
        """A stream that does not end while nobody reads it: it is larger than the buffers of both sides."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 900,
            "stream": True,
            "ignore_eos": True,
            "n": 8,
            "logprobs": 20,
        }

    def audited(self, request_id: str) -> dict[str, Any]:
        assert self.server.options.audit is not None
        self.server.options.audit.flush()
        lines = [json.loads(line) for line in self.audit.read_text().splitlines()]
        return next(line for line in lines if line["request_id"] == request_id)


def torch_engine() -> Any:
    options = EngineOptions(dtype="float32", threads=1, kv_memory="64MB",
                            text=replace(TextOptions(), text_processes=1, template_timeout=10))  # fmt: skip
    return open_engine([str(shared_data("models", "classics-1M"))], "torch", options)


@pytest.fixture(scope="module")
def artifact_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("artifact")
    made = House(folder, MODEL, lambda: tiny_engine(folder / "tokenizer"))
    yield made
    made.server.close()


@pytest.fixture(scope="module")
def torch_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    pytest.importorskip("torch", reason="the torch engine is not here")
    shared_data("models", "classics-1M")
    made = House(tmp_path_factory.mktemp("torch"), "classics-1M", torch_engine)
    yield made
    made.server.close()


@pytest.fixture(params=["artifact", "torch"])
def house(request: pytest.FixtureRequest) -> House:
    made: House = request.getfixturevalue(f"{request.param}_house")
    return made


def code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


# The cache


def test_a_prompt_of_another_is_not_in_the_cache(house: House) -> None:
    secret = (
        "The merger with Initech will be announced on the ninth of May, and nobody may know of it before. "
        * 2
    )
    assert house.cached("alice", secret) == 0
    assert house.cached("alice", secret) >= 16
    assert house.cached("bob", secret) == 0
    assert house.cached("bob", secret) >= 16  # bob's own prompt is in his cache


def test_tenants_of_a_group_share_what_is_cached(house: House) -> None:
    common = (
        "The same system prompt of the whole team stands before each of its questions, word for word. " * 2
    )
    assert house.cached("carol", common) == 0
    assert house.cached("dan", common) >= 16
    assert house.cached("alice", common) == 0


def test_a_salt_of_the_clients_own_parts_its_cache_and_opens_no_other(house: House) -> None:
    prompt = "One user of alice's application must not learn what another of its users has asked of it. " * 2
    assert house.cached("alice", prompt, cache_salt="user-1") == 0
    assert house.cached("alice", prompt, cache_salt="user-1") >= 16
    assert house.cached("alice", prompt, cache_salt="user-2") == 0
    assert house.cached("alice", prompt) == 0
    for guess in ("alice", "user-1", Key("alice", hashed(house.secrets["alice"])).tenant.salt):
        assert house.cached("bob", prompt, cache_salt=guess) == 0
    assert house.complete("alice", prompt, cache_salt="").status_code == 400


def test_a_prompt_that_another_is_answered_now_is_not_borrowed(house: House) -> None:
    """A running sequence shares its pages with another one that begins alike, but not across tenants."""
    prompt = "While this text is being answered, somebody else asks the same to see whether it is there. " * 2
    begun, ended = threading.Event(), threading.Event()

    def hold() -> None:
        body = {**house.endless(prompt), "n": 4}  # bob's answer is computed beside alice's, not after hers
        with house.http("alice") as http, http.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_lines():
                begun.set()
                if ended.is_set():
                    return

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert begun.wait(60)
        assert house.cached("bob", prompt) == 0
    finally:
        ended.set()
        thread.join(60)


def test_salts_cannot_be_made_to_meet() -> None:
    salts = {
        "nobody": "", "alice": Key("alice", "a").tenant.salt, "another alice": Key("alice", "b").tenant.salt,
        "group alice": Key("x", "a", cache_group="alice").tenant.salt,
        "her user": Key("alice", "a").tenant.within("bob").salt, "open": ANONYMOUS.within("alice").salt,
        "another's user of this name": Key("carol", "c").tenant.within("bob").salt,
        "joined": digest("ab", "c"), "otherwise": digest("a", "bc"),
    }  # fmt: skip
    assert len(set(salts.values())) == len(salts)
    assert Key("x", "a", cache_group="g").tenant.salt == Key("y", "b", cache_group="g").tenant.salt
    assert Tenant("t", "s").within(None).salt == Tenant("t", "s").within("").salt == "s"
    assert "alice" not in Key("alice", "a").tenant.salt


# Embeddings


def test_embeddings_cost_a_key_its_tokens(torch_house: House) -> None:
    """Embeddings count like prompts: against the key, in the audit log, in the metrics."""
    texts = ["a cat and a dog and a bird " * 3] * 2
    with torch_house.http("poor") as http:
        first = http.post("/v1/embeddings", json={"model": torch_house.model, "input": texts[0]},
                          headers={"X-Request-Id": "vectors-1"})  # fmt: skip
    assert first.status_code == 200
    tokens = first.json()["usage"]["prompt_tokens"]
    assert 10 < tokens <= 40
    entry = torch_house.audited("vectors-1")
    assert (entry["key"], entry["endpoint"], entry["outcome"]) == ("poor", "/v1/embeddings", "ok")
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (tokens, 0)
    answers = [torch_house.embed("poor", texts[0]) for _ in range(3)]
    assert 429 in [answer.status_code for answer in answers]
    limited = next(answer for answer in answers if answer.status_code == 429)
    assert code(limited) == "tokens_per_minute"
    assert int(limited.headers["retry-after"]) >= 1
    never = torch_house.embed("poor", texts * 4)
    assert (never.status_code, code(never)) == (400, "tokens_per_minute")
    with torch_house.http("root") as http:
        metrics = http.get("/metrics").text
    assert re.search(r'nearfar:requests_total\{model_name="classics-1M",outcome="limited"\} [1-9]', metrics)
    assert re.search(r'nearfar:requests_total\{model_name="classics-1M",outcome="ok"\} [1-9]', metrics)


def test_embeddings_count_as_tokens_under_way_and_stop_with_the_server(torch_house: House) -> None:
    service = torch_house.service
    limits = service.admission.limits
    try:
        service.admission.limits = replace(limits, tokens=5)
        service.admission.tokens += 1  # another request's token
        refused = torch_house.embed("alice", "a cat and a dog and a bird and a fish")
        assert (refused.status_code, code(refused)) == (429, "queue_full")
    finally:
        service.admission.limits = limits
        service.admission.tokens -= 1
    try:
        service.draining = True
        stopped = torch_house.embed("alice", "a cat")
        assert (stopped.status_code, code(stopped)) == (503, "shutting_down")
    finally:
        service.draining = False
    assert torch_house.embed("alice", "a cat").status_code == 200
    for _ in range(500):  # waits for streams that other tests have left
        if not service.live:
            break
        time.sleep(0.02)
    assert (service.admission.requests, service.admission.tokens, service.live) == (0, 0, {})


def test_an_artifact_still_refuses_embeddings_by_name(house: House) -> None:
    answer = house.embed("alice", "a cat")
    if house.model == MODEL:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    else:
        assert answer.status_code == 200
    assert house.service.admission.under_way("alice") == 0


# Limits


async def test_a_key_that_is_edited_while_it_works_keeps_count() -> None:
    now = [0.0]
    admission = Admission(ServerLimits(), OwnCounts(1, lambda: now[0]))
    before = Key("k", "x", concurrent=2, requests_per_minute=10).tenant
    tickets = [await admission.enter(before), await admission.enter(before)]
    after = Key("k", "x", concurrent=2, requests_per_minute=20).tenant
    with pytest.raises(ApiError, match="2 requests under way"):
        await admission.enter(after)
    for ticket in tickets:
        ticket.leave()
    assert admission.under_way("k") == 0
    for _ in range(18):  # 18 of 20 requests a minute are left, because 2 were taken before
        (await admission.enter(after)).leave()
    with pytest.raises(ApiError, match="20 requests a minute"):
        await admission.enter(after)
    for _ in range(3):  # an edit of the key does not start a new minute
        with pytest.raises(ApiError, match="a minute"):
            await admission.enter(replace(after, priority=-1))


def test_a_key_that_is_edited_under_a_stream_is_not_locked_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "CHECK_SECONDS", 0.0)
    good = house.file.read_text()
    with house.http("one") as http:
        body = house.endless()
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            house.file.write_text(good.replace("concurrent = 1", "concurrent = 1\nrequests_per_minute = 600"))
            assert code(house.complete("one", "Hi")) == "concurrent"
    for _ in range(500):
        if house.service.admission.under_way("one") == 0:
            break
        time.sleep(0.02)
    assert house.complete("one", "Hi").status_code == 200
    house.file.write_text(good)


def test_requests_of_a_key_count_before_their_bodies_are_read(house: House) -> None:
    """A key that may have one request under way cannot hold a second connection whose body the
    server keeps.
    """
    port = int(house.server.address.rsplit(":", 1)[1])
    head = (
        "POST /v1/completions HTTP/1.1\r\n"
        "Host: x\r\n"
        "Content-Type: application/json\r\n"
        "Content-Length: 100000\r\n"
        f"Authorization: Bearer {house.secrets['one']}\r\n"
        "\r\n"
        "{"
    ).encode()
    with socket.create_connection(("127.0.0.1", port), 30) as first:
        first.sendall(head)
        for _ in range(500):
            if house.service.admission.under_way("one"):
                break
            time.sleep(0.02)
        with socket.create_connection(("127.0.0.1", port), 30) as second:
            # the client sends a single byte of the body: the answer does not wait for the rest
            second.sendall(head)
            got = b""
            while b"\r\n\r\n{" not in got and (data := second.recv(65536)):
                got += data
        assert got.startswith(b"HTTP/1.1 429")
        assert b'"concurrent"' in got
    for _ in range(500):
        if not house.service.admission.under_way("one"):
            break
        time.sleep(0.02)
    assert house.complete("one", "Hi").status_code == 200


def test_what_is_refused_at_the_door_is_audited_and_counted(house: House) -> None:
    with house.http("one") as http:
        body = house.endless()
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            with house.http("one") as other:
                refused = other.post("/v1/completions", json=body, headers={"X-Request-Id": "turned-away"})
    assert refused.status_code == 429
    entry = house.audited("turned-away")
    assert (entry["key"], entry["outcome"], entry["status"]) == ("one", "limited", 429)


def test_who_asks_for_much_does_not_stand_before_everybody(house: House) -> None:
    """Alice requests 192 answers at once. Bob, who comes later and wants one answer, does not wait until her
    last one has begun. The test ends alice's requests when bob has his answer.
    """
    body = {"model": house.model, "prompt": list("abcdef"), "n": 32, "max_tokens": 150, "ignore_eos": True}

    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nAuthorization: Bearer {house.secrets['alice']}\r\n\r\n"
    )
    engine = house.server.engine
    with socket.create_connection(("127.0.0.1", house.server.port), 30) as alice:
        alice.sendall(head.encode() + data)
        for _ in range(3000):
            if engine.stats().waiting >= 60:
                break
            time.sleep(0.01)
        assert engine.stats().waiting >= 60
        assert house.complete("bob", "One short answer").status_code == 200
        assert engine.stats().waiting > 0
    for _ in range(3000):
        if house.service.admission.under_way("alice") == 0:
            break
        time.sleep(0.01)
    assert (house.service.admission.under_way("alice"), engine.stats().waiting) == (0, 0)


def test_shares_of_the_line() -> None:
    now = [0.0]
    shares, alice, bob = Shares(lambda: now[0]), Tenant("alice"), Tenant("bob")
    assert [shares.late(alice) for _ in range(4)] == [0, 0.5, 1.0, 1.5]
    now[0] = 1.0
    assert shares.late(bob) == 0  # bob's request comes before alice's last two
    shares.leave(alice, 3)
    assert shares.late(alice) == 0.5  # and not before alice's earlier ones
    shares.leave(alice, 2)
    assert shares.late(alice) == 0
    shares.leave(alice, 1)
    shares.leave(bob, 1)
    assert (shares._under_way, shares._last) == ({}, {})


def test_urgency_is_a_right_of_the_key(house: House) -> None:
    refused = house.complete("alice", "Hi", priority=-1)
    assert (refused.status_code, code(refused)) == (403, "priority")
    assert refused.json()["error"]["param"] == "priority"
    assert "0" in refused.json()["error"]["message"]
    assert house.complete("alice", "Hi", priority=5).status_code == 200
    assert house.complete("urgent", "Hi", priority=-10).status_code == 200
    assert house.complete("urgent", "Hi", priority=-11).status_code == 403


async def test_limits_of_one_of_several_fronts_are_its_part() -> None:
    admission = Admission(ServerLimits(fronts=2), OwnCounts(2, lambda: 0.0))
    key = Key("k", "x", requests_per_minute=5, tokens_per_minute=100, concurrent=3).tenant
    tickets = [await admission.enter(key), await admission.enter(key)]
    with pytest.raises(ApiError, match="under way"):
        await admission.enter(key)
    for ticket in tickets:
        ticket.leave()
    with pytest.raises(ApiError, match="a minute"):
        await admission.enter(key)


async def test_what_answers_hold_in_memory_is_bounded_with_alternatives_too() -> None:
    admission = Admission(ServerLimits(tokens=1000), OwnCounts(1, lambda: 0.0))
    plain, rich, other = [await admission.enter(ANONYMOUS) for _ in range(3)]
    for ticket, wanted in (
        (plain, EngineRequest("a", MODEL)),
        (rich, EngineRequest("b", MODEL, logprobs=20)),
    ):
        ticket.admit()
        await ticket.charge(Prepared(wanted, (), 10))
        for _ in range(50):
            ticket.hold(answer_weight(wanted))
    assert admission.tokens == 20 + 50 + 16 * 50
    plain.hold(200)  # the request holds much, but another one holds more
    with pytest.raises(ApiError, match="tokens under way"):
        rich.hold(16)
    other.admit()
    # so a small request need not wait for it
    await other.charge(Prepared(EngineRequest("c", MODEL), (), 10))
    for ticket in (plain, rich, other):
        ticket.leave()
    assert admission.tokens == 0


async def test_the_slot_of_a_stream_comes_back_if_nothing_of_it_can_be_sent(tmp_path: Path) -> None:
    """The transport fails at the first byte: the generator of events has not started, and the call ends all
    the same.
    """
    from nearfar.fallback_server.http.app import create_app

    engine: ServerEngine = await tiny_engine(tmp_path)
    audit = AuditLog(tmp_path / "audit.jsonl", False)
    app = create_app(engine, AppOptions(audit=audit))
    body = json.dumps(
        {"model": MODEL, "prompt": "Hi", "max_tokens": 500, "stream": True, "logit_bias": ENDLESS}
    ).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        raise OSError("the transport is gone")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"x")],
        "scheme": "http",
        "http_version": "1.1",
        "server": ("x", 80),
        "client": ("y", 1),
        "root_path": "",
        "asgi": {"version": "3.0"},
    }
    try:
        with pytest.raises(OSError, match="gone"):
            await asyncio.wait_for(app(scope, receive, send), 30)
        service = app.state.service
        assert (service.admission.requests, service.admission.tokens, service.live) == (0, 0, {})
        for _ in range(500):
            if not engine.stats().running:
                break
            await asyncio.sleep(0.02)
        assert engine.stats().running == 0
        audit.flush()
        assert json.loads((tmp_path / "audit.jsonl").read_text())["outcome"] == "aborted"
    finally:
        await engine.close()
