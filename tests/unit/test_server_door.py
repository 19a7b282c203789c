"""The server's entrance: the requested host, logs about strangers, the number of connections, and silent
streams.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx_sse
import pytest

from nearfar.fallback_server.engines.local import TextOptions
from nearfar.fallback_server.engines.upstream import UpstreamEngine, UpstreamOptions
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.fallback_server.http.logs import AuditLog, JsonFormatter, TextFormatter
from nearfar.hosts import answered_hosts
from tests.support.late import late
from tests.support.servers import MODEL, Front, RunningServer, tiny_engine

openai = late("openai")

LIMITS = ServerLimits(connections=12, keep_alive=0.3, write_timeout=3.0)
# A conversation that says "loop" takes longer than its template may, in few steps, so the sandbox's bound of
# steps does not end it.
TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% if m['content'] == 'loop' %}{% for i in range(90000) %}{% set x = range(90000) | list %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    options = TextOptions(template_timeout=1.5, text_processes=1)
    made = RunningServer(lambda: tiny_engine(directory, options=options), AppOptions(LIMITS))
    yield made
    made.close()


@pytest.fixture(scope="module")
def front(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    made = Front(server, folder, "--allowed-host", "llm.example", "--audit", str(folder / "audit.jsonl"))
    yield made
    made.close()


def raw(port: int, request: bytes) -> bytes:
    """Everything that the server sends until it closes."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(request)
        got = b""
        while data := connection.recv(65536):
            got += data
        return got


def get(port: int, path: str, host: str | None) -> bytes:
    named = "" if host is None else f"Host: {host}\r\n"
    version = "1.0" if host is None else "1.1"
    return raw(port, f"GET {path} HTTP/{version}\r\n{named}Connection: close\r\n\r\n".encode("latin-1"))


# Which host is meant


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST:{port}", "llm.example", "127.0.0.1:{port}", None]
)
def test_the_names_of_this_machine_are_answered(front: Front, host: str | None) -> None:
    assert get(front.port, "/v1/models", host and host.format(port=front.port)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "[::1].evil",
        "",
        "evil",
        "llm.example.evil",
        "127.0.0.1:{port}:80",
        "[::ffff:6666]",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/openapi.json"])
def test_a_page_whose_name_was_bound_to_this_machine_gets_nothing(front: Front, path: str, host: str) -> None:
    answer = get(front.port, path, host.format(port=front.port))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 421")
    assert json.loads(body)["error"]["code"] == "wrong_host"
    assert b"tiny" not in answer


def test_a_target_that_is_a_whole_address_is_read_as_one(front: Front) -> None:
    """The host of the address counts, not that of the header (RFC 9112, 3.2.2)."""
    there = get(front.port, f"http://127.0.0.1:{front.port}/v1/models", "evil.example")
    assert there.startswith(b"HTTP/1.1 200")
    assert b"tiny" in there
    assert get(front.port, "http://evil.example/v1/models", f"127.0.0.1:{front.port}").startswith(
        b"HTTP/1.1 421"
    )
    assert get(front.port, f"http://127.0.0.1:{front.port}", None).split(b" ", 2)[1] == b"200"


def test_which_hosts_are_meant_depends_on_who_can_come() -> None:
    assert answered_hosts("127.0.0.1", ()) == ("localhost", "127.0.0.1", "[::1]", "127.0.0.1")
    assert "[::1]" in answered_hosts("::1", ())
    assert answered_hosts("0.0.0.0", ()) == ()  # with keys, a server answers to any host name
    assert "llm.example" in answered_hosts("0.0.0.0", ("llm.example",))
    assert answered_hosts("127.0.0.1", ("*",)) == ()


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_form_of_another_site_is_not_taken_for_json(server: RunningServer, kind: str) -> None:
    """A page may send these forms without a preflight request."""
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1})
    answer = httpx.post(f"{server.address}/v1/completions", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


# What logs show of strangers


def test_a_stranger_writes_no_line_into_the_log(front: Front) -> None:
    path = "/x%0A00:00:00%20info%20request%20method=POST%20path=/forged%20status=200%0D%1B%5B2J%C2%9B31m%E2%80%A8%20key=alice"  # noqa: E501
    assert get(front.port, path, "localhost").startswith(b"HTTP/1.1 404")
    for _ in range(500):
        if b"/forged" in (log := front.log.read_bytes()):
            break
        time.sleep(0.02)
    assert b"\x1b" not in log
    assert b"\xc2\x9b" not in log
    assert b"\xe2\x80\xa8" not in log
    lines = [line for line in log.splitlines() if b"/forged" in line]
    assert len(lines) == 1
    assert b"method=GET" in lines[0]
    # the injected text is in quotes, so it is not a field of the log
    assert b'path="/x\\n00:00:00 info request' in lines[0]


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_messages_and_exceptions_cannot_speak_to_the_terminal(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("first\n00:00:00 info forged\x1b[2J\x9b")
    except ValueError:
        record = logging.LogRecord(
            "n", logging.ERROR, "f", 1, "failed: %s", ("a\nb\x1b\x9b\u202e",), sys.exc_info()
        )
    record.fields = {"path": 'a b="c"\n', "status": 200, "name": "über"}
    text = formatter.format(record)
    assert not set(text) & set("\x1b\x9b\r\u202e\x07")
    assert all(not line.startswith("00:00:00") for line in text.splitlines())
    if isinstance(formatter, TextFormatter):
        assert " status=200 " in text
        assert " name=über" in text
        assert 'path="a b=\\"c\\"\\n"' in text
    else:
        assert json.loads(text)["path"] == 'a b="c"\n'


def test_the_audit_log_is_its_owners(front: Front, tmp_path: Path) -> None:
    made = front.log.with_name("audit.jsonl")
    assert made.stat().st_mode & 0o777 == 0o600
    given = tmp_path / "given.jsonl"
    given.touch(mode=0o640)
    given.chmod(0o640)
    AuditLog(given, True).close()
    assert given.stat().st_mode & 0o777 == 0o640


def test_with_keys_only_probes_are_open(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.toml", Key("alice", hashed("secret")))
    options = AppOptions(keys=KeyStore(tmp_path / "keys.toml"))
    server = RunningServer(lambda: tiny_engine(tmp_path / "tokenizer"), options)
    try:
        with httpx.Client(base_url=server.address) as http:
            for path in ("/openapi.json", "/v1/models", "/", "/anything"):
                assert http.get(path).status_code == 401, path
            assert http.get("/health").status_code == 200
            assert http.get("/openapi.json", headers={"Authorization": "Bearer secret"}).status_code == 200
    finally:
        server.close()


# How many may come


def test_too_many_connections_are_told_so_and_probes_are_answered(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(LIMITS.connections):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30))
        for _ in range(500):
            if server.connections >= LIMITS.connections:
                break
            time.sleep(0.02)
        answer = get(server.port, "/v1/models", "x")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert int(re.search(rb"(?i)retry-after: (\d+)", head)[1]) >= 1  # type: ignore[index]
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        assert get(server.port, "/health", "x").startswith(b"HTTP/1.1 200")
        assert get(server.port, "/metrics", "x").startswith(b"HTTP/1.1 200")
    for _ in range(500):
        if not server.connections:
            break
        time.sleep(0.02)
    assert get(server.port, "/v1/models", "x").startswith(b"HTTP/1.1 200")


def test_two_fronts_grant_a_key_its_limits_together(server: RunningServer, tmp_path: Path) -> None:
    """Two processes with the same keys file, as the chart starts them."""
    keys = tmp_path / "keys.toml"
    add_key(keys, Key("alice", hashed("secret"), requests_per_minute=6))
    fronts = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            fronts.append(Front(server, tmp_path / name, "--keys", str(keys), "--fronts", "2"))
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
        began = time.monotonic()
        statuses = [
            httpx.post(
                f"{front.url}/v1/completions",
                json=body,
                headers={"Authorization": "Bearer secret"},
                timeout=60,
            ).status_code
            for _ in range(5)
            for front in fronts
        ]
        filled = (time.monotonic() - began) * 6 / 60  # requests that have become available meanwhile
    finally:
        for front in fronts:
            front.close()
    assert set(statuses) <= {200, 429}
    assert 6 <= statuses.count(200) <= 6 + filled


# Streams that have nothing to say


@contextmanager
def stalled(server: RunningServer, seconds: float) -> Iterator[None]:
    """Make each step of the device take this many seconds."""
    engine: Any = server.engine
    executor = engine.backend.core.executor
    run = executor.run

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return run(*args)

    executor.run = slow
    try:
        yield
    finally:
        del executor.run


BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Hello there",
    "max_tokens": 3,
    "temperature": 0,
    "logit_bias": {"257": -100},
}


def test_a_silent_stream_shows_that_it_lives_and_readers_skip_that(server: RunningServer) -> None:
    whole = httpx.post(f"{server.address}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
    upstream = RunningServer(
        lambda: UpstreamEngine.connect([server.address], UpstreamOptions(probe_seconds=300))
    )
    try:
        with stalled(server, 1.2):
            body = {
                **BODY,
                "stream": True,
                "logprobs": 1,
            }  # so each token is an event of its own, whether it has text or not
            with httpx.stream("POST", f"{server.address}/v1/completions", json=body, timeout=60) as response:
                lines = [line for line in response.iter_lines() if line]
            client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60)
            read = [chunk.choices[0].text for chunk in client.completions.create(**BODY, stream=True)]
            with httpx_sse.connect_sse(
                httpx.Client(timeout=60),
                "POST",
                f"{server.address}/v1/completions",
                json={**BODY, "stream": True},
            ) as source:
                events = [event.data for event in source.iter_sse()]
            through = httpx.post(f"{upstream.address}/v1/completions", json=BODY, timeout=60).json()[
                "choices"
            ][0]["text"]
    finally:
        upstream.close()
    comments = [index for index, line in enumerate(lines) if line.startswith(":")]
    first = next(index for index, line in enumerate(lines) if line.startswith("data:"))
    assert comments[0] < first  # the comment came while the prompt was computed
    assert any(index > first for index in comments), lines
    assert lines[-1] == "data: [DONE]"
    assert "".join(read) == through == whole
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


def test_an_error_after_the_first_comment_is_an_event(server: RunningServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "loop"}], "stream": True}
    with httpx.stream("POST", f"{server.address}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert lines[0].startswith(":")
    assert "chat template" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    service = server.app.state.service
    assert (service.admission.requests, service.live) == (0, {})


def test_a_client_that_leaves_before_the_first_token_leaves_nothing(server: RunningServer) -> None:
    with stalled(server, 1.0):
        for wait in (0.1, 0.8):  # the client leaves before and after the first comment
            with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
                data = json.dumps({**BODY, "max_tokens": 500, "stream": True}).encode()
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
                )
                time.sleep(wait)
        service, engine = server.app.state.service, server.engine
        for _ in range(1000):
            if not (service.live or engine.stats().running or engine.stats().waiting):
                break
            time.sleep(0.02)
        assert (service.live, service.admission.requests, service.admission.tokens) == ({}, 0, 0)
        assert engine.stats().running == 0


# Readers that are slow on purpose


def test_slow_readers_do_not_take_the_server(tmp_path: Path) -> None:
    """Many clients request long answers and read nothing; one client reads."""
    slow, tokens = 24, 100  # each answer has about 800 kB: the buffers of both sides hold 64 kB
    server = RunningServer(
        lambda: tiny_engine(tmp_path / "tokenizer", slots=8, pages=1024),
        AppOptions(ServerLimits(write_timeout=3.0)),
    )
    body = {**BODY, "max_tokens": tokens, "n": 4, "logprobs": 20, "stream": True}
    data = json.dumps(body).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"  # noqa: E501
        % len(data)
    )
    try:
        with ExitStack() as stack:
            connections = []
            for _ in range(slow):
                made = stack.enter_context(socket.socket())
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                made.connect(("127.0.0.1", server.port))
                made.sendall(head + data)
                connections.append(made)
            answered: list[int] = []

            def good() -> None:
                response = httpx.post(
                    f"{server.address}/v1/completions", json={**BODY, "max_tokens": 8}, timeout=120
                )
                answered.append(response.status_code)

            reader = threading.Thread(target=good)
            reader.start()
            reader.join(60)
            assert answered == [200]
            deadline = time.monotonic() + 60
            admission, stats = server.app.state.service.admission, server.engine.stats
            while (
                server.connections or admission.requests or stats().running
            ) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert (server.connections, admission.requests, stats().running, stats().waiting) == (0, 0, 0, 0)
    finally:
        server.close()
