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
from nearfar.fallback_server.http.passing import FORMS
from nearfar.remote.server import CHAT, NATIVE
from scripts.server_fields import PATHS, rows
from tests.fuzz.effort import effort
from tests.support.bodies import BASES
from tests.support.clouds import DONE, STREAM, Cloud, described, listing, reply, said, usage
from tests.support.fronts import opened_fronts
from tests.support.servers import MODEL, RunningServer, tiny_engine

LIMITS = ServerLimits(
    header_timeout=0.4, body_timeout=0.4, write_timeout=2.0, body_bytes=20_000, header_bytes=4096
)


http = httpx.Client()  # making one reads the certificates


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
            error = json.loads(body)["error"]
            assert error if isinstance(error, str) else error["message"]  # Ollama's are texts
    for line in log.lines:
        assert line.isprintable(), line
    log.lines.clear()
    service = server.app.state.service
    assert http.get(f"{server.address}/health", headers={"Host": "localhost"}).status_code == 200
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
SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/api/chat": {"options": {"num_predict": 1}},
    "/api/generate": {"options": {"num_predict": 1}},
}
"""What keeps the answers of a path short."""
FIELDS = {
    path: st.sampled_from([*sorted({row.path for row in rows(model)}), "\x1b[2J", "messages", "a.b"])
    for path, model in PATHS.items()
}
"""The fields that a path knows, at their places, and some that no path knows."""


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a request of it with up to three values of any type, at any places."""
    path = draw(st.sampled_from(sorted(BASES)))
    changes: dict[str, Any] = {}
    for field in draw(st.lists(FIELDS[path], max_size=3)):
        value = draw(TREES)
        name, *inner = field.split(".")
        for part in reversed(inner):
            value = {part: value} if draw(st.booleans()) else [{part: value}]
        changes[name] = value
    return path, {"model": MODEL, **BASES[path], **SHORT.get(path, {}), **changes}


def post(server: RunningServer, path: str, body: bytes, kind: str = "application/json") -> bytes:
    """The answer to a whole request. (A client that closes its side counts as gone, so this one waits.)"""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nAuthorization: Bearer secret"
        f"\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head.encode() + body)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    assert answer
    return answer


@effort(120)
@given(asked=bodies())
def test_any_body(server: RunningServer, log: Lines, asked: tuple[str, dict[str, Any]]) -> None:
    path, body = asked
    judge(server, log, post(server, path, json.dumps(body).encode()))


RANKED = {"results": [], "model": "theirs", "usage": {"input_tokens": 2, "output_tokens": 3}}


def upstream(path: str, body: dict[str, Any]) -> Iterator[bytes]:
    """A server that lists every path that can be forwarded, each with a salt."""
    if path == "/v1/models":
        yield listing("theirs", "secret")
    elif path == "/openapi.json":
        yield reply("200 OK", described({name: ["model", "cache_salt", "priority"] for name in NATIVE}))
    elif path == "/v1/chat/completions":
        yield STREAM + said("Hi.") + said(finish="stop") + usage(3, 2) + DONE
    elif path in NATIVE:
        yield reply("200 OK", RANKED)
    else:
        yield reply("400 No", {"error": {"message": "not this one"}})


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with Cloud(upstream) as made:
        yield made


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, log: Lines, cloud: Cloud) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("front") / "keys.toml"
    add_key(keys, Key("alice", hashed("secret")))
    options = AppOptions(LIMITS, KeyStore(keys), hosts=("localhost",))
    with opened_fronts() as fronts:
        server, _ = fronts(cloud, (MODEL,), options)
        yield server


PART = st.tuples(
    st.sampled_from([b'name="model"', b'name="file"; filename="a"', b'name="prompt"', b"name=model", b""]),
    st.sampled_from([MODEL.encode(), b"secret", b"\x00\xff", b"--x", b'name="model"', b""]),
).map(lambda part: b"--x\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % part)
NAMED = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n' % MODEL.encode()
PARTS = st.lists(PART, max_size=2).map(b"".join)
ENDS = st.sampled_from([b"--x--\r\n", b"--x", b""])
FORM = st.tuples(PARTS, st.sampled_from([b"", NAMED]), PARTS, ENDS).map(b"".join)
JSON_PATHS = sorted(set(NATIVE) - set(FORMS))


@st.composite
def forwarded(draw: st.DrawFn) -> tuple[str, bytes, str]:
    """A path of a front, a body, and its type."""
    if draw(st.booleans()):
        path, body = draw(bodies())
        return draw(st.sampled_from([path, *JSON_PATHS])), json.dumps(body).encode(), "application/json"
    return draw(st.sampled_from(FORMS)), draw(FORM), "multipart/form-data; boundary=x"


@effort(120)
@given(asked=forwarded())
def test_any_body_in_front_of_another_server(
    front: RunningServer, cloud: Cloud, log: Lines, asked: tuple[str, bytes, str]
) -> None:
    judge(front, log, post(front, *asked))
    salts = {body.get("cache_salt") for path, body in cloud.asked if path in (*JSON_PATHS, CHAT)}
    sent = [(path, body) for path, body in cloud.asked if path not in ("/v1/models", "/openapi.json")]
    cloud.asked.clear()
    for path, body in sent:
        if path in FORMS:
            assert b'name="model"\r\n\r\ntheirs\r\n' in body["form"], body
            assert b'name="model"\r\n\r\nsecret' not in body["form"], body
        else:
            assert body["model"] == "theirs", (path, body)
    # A client chooses neither another tenant's salt nor none.
    assert all(isinstance(salt, str) and len(salt) >= 32 for salt in salts), salts
