"""Keys, limits of keys and of the server, admin endpoints, audit, CORS, sizes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from nearfar.cli.keys import keys as keys_command
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.artifact import ArtifactBackend
from nearfar.fallback_server.engines.base import EngineRequest, Prepared, ServerEngine
from nearfar.fallback_server.engines.local import LocalEngine, TextOptions, TextSource
from nearfar.fallback_server.http import keys as keys_module
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.counts import OwnCounts
from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed, new_secret, read_keys
from nearfar.fallback_server.http.limits import Admission, ServerLimits
from nearfar.fallback_server.http.logs import AuditLog
from tests.support.commands import nearfar
from tests.support.servers import MODEL, RunningServer, tiny_engine, tokenizer_directory
from tests.unit.test_engine_memory import Narrow
from tests.unit.test_engine_memory import engine as core


class Secured:
    """A server with keys, and the keys."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.toml"
        self.secrets = {}
        for key in (
            Key("alice"),
            Key("bob", models=("other",)),
            Key("carol", concurrent=1),
            Key("root", admin=True),
            Key("dave", requests_per_minute=2),
            Key("eve", tokens_per_minute=40),
        ):
            self.add(key)
        self.audit = folder / "audit.jsonl"
        limits = ServerLimits(body_bytes=20_000, header_bytes=4096, requests=8, tokens=4000)
        options = AppOptions(
            limits, KeyStore(self.file), AuditLog(self.audit, False), ("https://app.example",)
        )
        self.server = RunningServer(lambda: tiny_engine(folder / "tokenizer", max_waiting=4), options)

    def add(self, key: Key) -> None:
        self.secrets[key.name] = secret = new_secret()
        add_key(self.file, Key(**{**key.__dict__, "hash": hashed(secret)}))

    def http(self, name: str | None, **headers: str) -> httpx.Client:
        auth = {"Authorization": f"Bearer {self.secrets[name]}"} if name else {}
        return httpx.Client(base_url=self.server.address, headers={**auth, **headers}, timeout=30)

    def complete(self, name: str, **body: Any) -> httpx.Response:
        with self.http(name) as http:
            return http.post(
                "/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 2, **body}
            )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("secured"))
    yield made
    made.server.close()


def code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


def test_users_and_admins_are_apart(secured: Secured) -> None:
    assert secured.complete("alice").status_code == 200
    with secured.http(None) as http:
        missing = http.get("/v1/models")
        assert (missing.status_code, code(missing)) == (401, "invalid_api_key")
        assert missing.headers["www-authenticate"] == "Bearer"
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 401
    with secured.http(None, Authorization="Bearer nf-wrong") as http:
        assert http.get("/v1/models").status_code == 401
    with secured.http("alice") as http:
        assert code(http.get("/admin/stats")) == "wrong_kind_of_key"
    with secured.http("root") as http:
        assert code(http.get("/v1/models")) == "wrong_kind_of_key"
        assert http.get("/metrics").status_code == 200
        assert http.get("/admin/stats").json()["engine"]["generated_tokens"] > 0
        listed = http.get("/admin/keys").text
    assert "alice" in listed
    assert "sha256" not in listed


@pytest.mark.parametrize("name", ["bad name!", "", "a\nb", "x" * 65, "ü", "-", "a/b"])
def test_a_key_has_a_name_that_stands_well_in_logs_and_commands(tmp_path: Path, name: str) -> None:
    done = nearfar("keys", tmp_path / "keys.toml", "--", name)
    assert done.returncode == 1
    assert "letters, digits and . _ @ + -" in done.stderr
    assert not (tmp_path / "keys.toml").exists()


def test_names_of_keys_that_are_taken(tmp_path: Path) -> None:
    names = ["alice", "team-a_2", "bob@example.com", "svc.web+eu"]
    for name in names:
        assert nearfar("keys", tmp_path / "keys.toml", name).returncode == 0
    # A name that an earlier version accepted still works.
    old = (tmp_path / "keys.toml").read_text().replace('"alice"', '"alice (web)"')
    (tmp_path / "keys.toml").write_text(old)
    assert [key.name for key in KeyStore(tmp_path / "keys.toml").keys] == ["alice (web)", *names[1:]]


def test_the_operator_sees_that_steps_became_smaller_for_lack_of_memory(tmp_path: Path) -> None:
    async def made() -> ServerEngine:
        backend = ArtifactBackend(core(lambda: Narrow(16)))
        text = TextOptions(template_timeout=10, text_processes=1)
        engine = LocalEngine(
            backend, TextSource(tokenizer_directory(tmp_path), 256), text, (MODEL,), here=True
        )
        await engine.start()
        return engine

    add_key(tmp_path / "keys.toml", Key("root", admin=True, hash=hashed(secret := new_secret())))
    add_key(tmp_path / "keys.toml", Key("alice", hash=hashed(user := new_secret())))
    server = RunningServer(made, AppOptions(keys=KeyStore(tmp_path / "keys.toml")))
    with httpx.Client(base_url=server.address, timeout=30) as http:

        def steps() -> list[int]:
            root = {"Authorization": f"Bearer {secret}"}
            text, stats = http.get("/metrics", headers=root).text, http.get("/admin/stats", headers=root)
            told = stats.json()["engine"]["program"]
            assert f'largest_step_rows{{model_name="tiny"}} {told["largest_step"]:.1f}' in text
            assert f'largest_built_step_rows{{model_name="tiny"}} {told["largest_bucket"]:.1f}' in text
            return [told["largest_step"], told["largest_bucket"]]

        assert steps() == [256, 256]
        body = {"model": MODEL, "prompt": "a" * 90, "max_tokens": 2}
        auth = {"Authorization": f"Bearer {user}"}
        assert http.post("/v1/completions", json=body, headers=auth).status_code == 200
        assert steps() == [16, 256]
    server.close()


def test_a_key_sees_only_its_models(secured: Secured) -> None:
    refused = secured.complete("bob")
    assert (refused.status_code, code(refused)) == (404, "model_not_found")
    with secured.http("bob") as http:
        assert http.get("/v1/models").json()["data"] == []


def test_requests_and_tokens_a_minute(secured: Secured) -> None:
    assert [secured.complete("dave").status_code for _ in range(3)] == [200, 200, 429]
    limited = secured.complete("dave")
    assert 1 <= int(limited.headers["retry-after"]) <= 31
    assert code(limited) == "requests_per_minute"
    assert secured.complete("eve", prompt="x" * 38, max_tokens=1).status_code == 200
    assert code(secured.complete("eve", prompt="x" * 10)) == "tokens_per_minute"
    never = secured.complete("eve", prompt="x" * 60)
    assert (never.status_code, code(never)) == (400, "tokens_per_minute")


def test_concurrent_requests_of_a_key_and_an_admin_who_ends_one(secured: Secured) -> None:
    got: list[str] = []
    running = threading.Event()

    def read() -> None:
        body = {
            "model": MODEL,
            "prompt": "Hi",
            "max_tokens": 900,
            "stream": True,
            "logit_bias": {"257": -100},
        }
        with secured.http("carol") as http, http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                got.append(line)
                running.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert running.wait(20)
    second = secured.complete("carol")
    assert (second.status_code, code(second)) == (429, "concurrent")
    with secured.http("root") as http:
        under_way = [r for r in http.get("/admin/requests").json()["requests"] if r["key"] == "carol"]
        assert len(under_way) == 1
        assert http.delete(f"/admin/requests/{under_way[0]['id']}").status_code == 200
        assert http.delete("/admin/requests/nothing").status_code == 404
    reader.join(20)
    assert [line for line in got if line][-1] == "data: [DONE]"
    assert any('"finish_reason": "abort"' in line for line in got)
    assert secured.complete("carol").status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ended_from_outside_does_not_look_complete(
    secured: Secured, path: str, stream: bool
) -> None:
    """These APIs have no word for such an end. The request is named by its X-Request-Id."""
    limits = {"max_tokens": 900} if path == "/v1/messages" else {"options": {"num_predict": 900}}
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": stream, **limits,
        "logit_bias": {"257": -100},
    }  # fmt: skip
    name, got = f"ended-{stream}-{path[-4:]}", list[tuple[int, str]]()

    def ask() -> None:
        with secured.http("alice", **{"X-Request-Id": name}) as http:
            answered = http.post(path, json=body)
            got.append((answered.status_code, answered.text))

    asking = threading.Thread(target=ask)
    asking.start()
    with secured.http("root") as http:
        for _ in range(500):
            if http.delete(f"/admin/requests/{name}").is_success:
                break
            time.sleep(0.01)
    asking.join(20)
    ((status, text),) = got
    assert "the request was ended at the server before its answer was complete" in text
    assert status in ((200, 499) if stream else (499,))  # a stream may end before it has begun
    assert "end_turn" not in text
    assert "done_reason" not in text


def test_the_keys_file_is_read_again_and_a_broken_one_is_not_taken(
    secured: Secured, monkeypatch: Any
) -> None:
    monkeypatch.setattr(keys_module, "CHECK_SECONDS", 0.0)
    secured.add(Key("frank"))
    assert secured.complete("frank").status_code == 200
    good = secured.file.read_text()
    secured.file.write_text("[[keys]\nbroken")
    assert secured.complete("frank").status_code == 200
    with secured.http("root") as http:
        assert http.post("/admin/keys/reload").status_code == 400
    secured.file.write_text(
        good.replace('name = "frank"', 'name = "gone"').replace(
            hashed(secured.secrets["frank"]), hashed("other")
        )
    )
    assert secured.complete("frank").status_code == 401
    secured.file.write_text(good)


def test_sizes(secured: Secured) -> None:
    large = secured.complete("alice", prompt="x" * 30_000)
    assert (large.status_code, code(large)) == (413, "request_too_large")
    with secured.http("alice") as http:
        chunked = http.post("/v1/completions", content=iter([b"{" + b" " * 15_000] * 2))
        assert chunked.status_code == 413
        assert http.get("/v1/models", headers={"X-Long": "y" * 5000}).status_code == 431
        assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("end", ["é" * 64, "g" * 64, "A" * 64, "a" * 63])
def test_a_hash_that_is_none_is_refused_when_it_is_read(tmp_path: Path, end: str) -> None:
    (tmp_path / "keys.toml").write_text(f'[[keys]]\nname = "a"\nhash = "sha256:{end}"\n', encoding="utf-8")
    with pytest.raises(RequestError, match="needs a hash"):
        read_keys(tmp_path / "keys.toml")


def test_cors_is_an_allow_list(secured: Secured) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with secured.http(None) as http:
        yes = http.options("/v1/models", headers={**ask, "Origin": "https://app.example"})
        no = http.options("/v1/models", headers={**ask, "Origin": "https://evil.example"})
        # The headers that the openai package sends from a public page whose user runs this server.
        names = "authorization,content-type,dangerously-allow-browser,openai-organization,x-stainless-arch"
        private = {"Access-Control-Request-Private-Network": "true"}
        asked = {**ask, **private, "Access-Control-Request-Headers": names, "Origin": "https://app.example"}
        package = http.options("/v1/chat/completions", headers=asked)
    assert yes.headers["access-control-allow-origin"] == "https://app.example"
    assert package.status_code == 200
    assert package.headers["access-control-allow-headers"] == names
    assert package.headers["access-control-allow-private-network"] == "true"
    assert no.status_code == 400
    assert "access-control-allow-origin" not in no.headers


def test_the_audit_log_names_who_and_what_but_not_the_text(secured: Secured) -> None:
    with secured.http("alice", **{"X-Request-Id": "audited-1"}) as http:
        http.post("/v1/completions", json={"model": MODEL, "prompt": "SECRET WORDS", "max_tokens": 2})
    wrong: list[tuple[str, object]] = [
        ("/v1/completions", {"model": MODEL}), ("/v1/messages", {"model": MODEL, "max_tokens": "SECRET"}),
        ("/api/chat", [1]), ("/v1/nothing", {}),
    ]  # fmt: skip
    for number, (path, body) in enumerate(wrong):
        with secured.http("alice", **{"X-Request-Id": f"wrong-{number}"}) as http:
            assert http.post(path, json=body).is_client_error
    assert secured.server.options.audit is not None
    secured.server.options.audit.flush()
    text = secured.audit.read_text()
    assert "SECRET" not in text
    entry = next(json.loads(line) for line in text.splitlines() if "audited-1" in line)
    assert (entry["key"], entry["model"], entry["outcome"], entry["status"]) == ("alice", MODEL, "ok", 200)
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (12, 2)
    for number, (path, _) in enumerate(wrong):
        (refused,) = (json.loads(line) for line in text.splitlines() if f"wrong-{number}" in line)
        assert (refused["key"], refused["endpoint"], refused["outcome"]) == ("alice", path, "refused")
    assert {json.loads(line)["outcome"] for line in text.splitlines()} >= {"ok", "limited", "refused"}


def test_many_requests_at_once_are_refused_beyond_the_bound(secured: Secured) -> None:
    """8 requests may be under way; 24 arrive."""
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(secured.complete("alice", max_tokens=300, logit_bias={"257": -100}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 8
    service = secured.server.app.state.service
    for _ in range(3000):
        if service.admission.requests == 0:
            break
        time.sleep(0.01)
    assert (service.admission.requests, service.admission.tokens, service.live) == (0, 0, {})


def prepared(prompt: int) -> Prepared:
    return Prepared(EngineRequest("id", MODEL), (), prompt)


async def test_buckets_fill_with_time() -> None:
    now = [0.0]
    admission = Admission(ServerLimits(requests=100, tokens=1000), OwnCounts(1, lambda: now[0]))
    key = Key("k", requests_per_minute=60, tokens_per_minute=120).tenant
    for _ in range(60):
        (await admission.enter(key)).leave()
    with pytest.raises(ApiError) as error:
        await admission.enter(key)
    assert error.value.problem.retry_after == pytest.approx(1.0)
    now[0] = 1.0
    ticket = await admission.enter(key)
    ticket.admit()
    await ticket.charge(prepared(100))
    assert (admission.tokens, admission.requests) == (100, 1)
    ticket.leave(completion_tokens=80)  # the answer overdraws
    ticket.leave(completion_tokens=80)  # leaving twice counts once
    assert (admission.tokens, admission.requests) == (0, 0)
    now[0] = 2.0
    other = await admission.enter(key)
    with pytest.raises(ApiError, match="120 tokens a minute"):
        await other.charge(prepared(10))
    other.leave()
    now[0] = 60.0
    last = await admission.enter(key)
    await last.charge(prepared(10))
    last.leave()


async def test_one_request_may_be_larger_than_the_bound_and_leaves_others_an_equal_part() -> None:
    admission = Admission(ServerLimits(tokens=100))
    first, second, third = [await admission.enter(Key(name).tenant) for name in "abc"]
    for ticket in (first, second, third):
        ticket.admit()
    await first.charge(prepared(500))
    with pytest.raises(ApiError, match="500 tokens under way"):
        await second.charge(prepared(60))
    await third.charge(prepared(10))


def test_keys_are_made_with_their_groups_and_bounds(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    app = typer.Typer()
    app.command()(keys_command)
    for arguments in (["a", "--cache-group", "team", "--priority", "-5"], ["b", "--concurrent", "2"]):
        assert CliRunner().invoke(app, [str(file), *arguments]).exit_code == 0
    first, second = read_keys(file)
    assert (first.cache_group, first.priority, first.concurrent) == ("team", -5, None)
    assert (second.cache_group, second.priority, second.concurrent) == (None, 0, 2)


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    add_key(file, Key("a", hashed("x"), ("m",), concurrent=3))
    add_key(file, Key("b", hashed("y"), admin=True))
    assert read_keys(file) == (Key("a", hashed("x"), ("m",), concurrent=3), Key("b", hashed("y"), admin=True))
    assert os.stat(file).st_mode & 0o077 == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.json"]
    with pytest.raises(RequestError, match="already"):
        add_key(file, Key("a", hashed("z")))
    store = KeyStore(file)
    assert store.find("x") == store.keys[0]
    assert store.find("") is None
    for wrong in (
        '{"keys": [{"name": "a"}]}',
        '{"keys": [{"name": "a", "hash": "sha256:1"}]}',
        '{"keys": 3}',
        "[",
        json.dumps({"keys": [{"name": "a", "hash": hashed("x"), "speed": 3}]}),
        json.dumps({"keys": [{"name": "a", "hash": hashed("x"), "concurrent": 0}]}),
        json.dumps({"keys": [{"name": "a", "hash": hashed("x"), "priority": 1001}]}),
        json.dumps({"keys": [{"name": "a", "hash": hashed("x"), "priority": True}]}),
        json.dumps({"keys": [{"name": "a", "hash": hashed("x"), "cache_group": ""}]}),
        json.dumps({"keys": [{"name": "a", "hash": hashed("x")}] * 2}),
    ):
        file.write_text(wrong)
        with pytest.raises(RequestError, match=r"keys\.json"):
            read_keys(file)
