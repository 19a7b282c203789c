"""Raw bytes sent to a real server: it answers or closes, logs one clean line, and works afterwards."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfar.fallback_server.engines.local import TextOptions
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.fallback_server.http.logs import TextFormatter
from tests.fuzz.effort import effort
from tests.support.servers import MODEL, RunningServer, tiny_engine

LIMITS = ServerLimits(
    header_timeout=0.4, body_timeout=0.4, write_timeout=2.0, body_bytes=20_000, header_bytes=4096
)


class Lines(logging.Handler):
    """Collects the lines that a terminal would get."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(TextFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:
            self.lines.append(self.format(record))


@pytest.fixture(scope="module")
def log() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, log: Lines) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    add_key(folder / "keys.toml", Key("alice", hashed("secret")))
    options = AppOptions(LIMITS, KeyStore(folder / "keys.toml"), hosts=("localhost",))
    text = TextOptions(template_timeout=10, text_processes=1)
    made = RunningServer(lambda: tiny_engine(folder / "tokenizer", options=text), options)
    yield made
    made.close()


def exchange(server: RunningServer, request: bytes) -> bytes:
    """Send a request; gives everything that comes until the server closes, which it must do in time."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        got = b""
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                got += data
        except ConnectionError:
            pass
        return got


def judge(server: RunningServer, log: Lines, answer: bytes) -> None:
    if answer:
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        assert 200 <= status < 500, answer[:500]
        if status >= 400 and b"application/json" in head.lower():
            assert json.loads(body)["error"]["message"]
    for line in log.lines:
        assert line.isprintable(), line
    log.lines.clear()
    service = server.app.state.service
    assert httpx.get(f"{server.address}/health", headers={"Host": "localhost"}).status_code == 200
    for _ in range(400):
        if not (service.live or service.admission.requests or service.admission.under_way("alice")):
            break
        time.sleep(0.01)
    assert (service.live, service.admission.requests, service.admission.under_way("alice")) == ({}, 0, 0)


CONTROL = st.sampled_from(
    [b"\x00", b"\x07", b"\x1b[2J", b"\x7f", b"\x9b", b"\r", b"\n", b"\t", b"\r\n", b" ", b"\xc2\x9b"]
)
NOISE = st.lists(CONTROL | st.binary(max_size=8), max_size=4).map(b"".join)
TARGETS = st.sampled_from(
    [
        b"/v1/completions",
        b"/v1/models",
        b"/health",
        b"/openapi.json",
        b"/admin/keys",
        b"/metrics",
        b"*",
        b"/x",
        b"http://evil/v1/models",
        b"//v1/models",
        b"/v1/../admin/keys",
        b"/%1b%5B2J%0aforged",
    ]
)
ESCAPES = st.lists(st.integers(0, 255).map(lambda n: b"%%%02x" % n), max_size=6).map(b"".join)
METHODS = st.sampled_from([b"GET", b"POST", b"OPTIONS", b"DELETE", b"TRACE", b"CONNECT", b"get", b"\x1bGET"])
HEADERS = st.sampled_from(
    [
        b"Host",
        b"Content-Length",
        b"Transfer-Encoding",
        b"Connection",
        b"X-Request-Id",
        b"Authorization",
        b"Expect",
        b"Upgrade",
        b"Origin",
        b"Content-Type",
        b"traceparent",
        b"Access-Control-Request-Method",
        b"",
    ]
)
VALUES = st.sampled_from(
    [
        b"localhost",
        b"0",
        b"5",
        b"-1",
        b"99999999999999999999",
        b"chunked",
        b"gzip, chunked",
        b"close",
        b"upgrade",
        b"websocket",
        b"100-continue",
        b"Bearer secret",
        b"Bearer ",
        b"application/json",
        b"abc\x1b[2J",
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    line = (
        draw(METHODS)
        + b" "
        + draw(TARGETS)
        + draw(ESCAPES)
        + draw(NOISE | st.just(b""))
        + draw(st.sampled_from([b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2.0", b"", b" HTTP/1.1 x"]))
        + b"\r\n"
    )
    headers = draw(st.lists(st.tuples(HEADERS, VALUES | NOISE), max_size=5))
    body = draw(st.sampled_from([b"", b"{}", b'5\r\n{"a":\r\n0\r\n\r\n']) | NOISE)
    return line + b"".join(name + b": " + value + b"\r\n" for name, value in headers) + b"\r\n" + body


@effort(60)
@given(request=requests() | st.binary(max_size=200))
def test_any_bytes(server: RunningServer, log: Lines, request: bytes) -> None:
    judge(server, log, exchange(server, request))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([MODEL, "stop", 10**30, -1, ""])
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "n",
        "stop",
        "logit_bias",
        "cache_salt",
        "priority",
        "stream",
        "stream_options",
        "logprobs",
        "response_format",
        "tools",
        "input",
        "dimensions",
        "seed",
        "\x1b[2J",
    ]
)


@effort(60)
@given(path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/embeddings"]),
       changes=st.dictionaries(FIELDS, TREES, max_size=3))  # fmt: skip
def test_any_body(server: RunningServer, log: Lines, path: str, changes: dict[str, Any]) -> None:
    base: dict[str, Any] = {
        "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
        "/v1/embeddings": {"input": "Hi"},
    }.get(path, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
    body = json.dumps({"model": MODEL, **base, **changes}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: "
        "Bearer secret\r\n"
    )
    end = f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    # A client that closes its side counts as gone, so this one waits for the answer.
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall((head + end).encode() + body)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    assert answer
    judge(server, log, answer)
