"""`nearfar serve` as a process: its output, answers, rejections, and how it ends."""

from __future__ import annotations

import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from nearfar.errors import RequestError
from nearfar.routing import HybridClient
from tests.shared_data import shared_data
from tests.support import commands
from tests.support.artifacts import Built
from tests.support.processes import descendants_that_run
from tests.support.proxy import Proxy

PATIENCE = 240
"""Seconds after which a test that waits for a process or an answer fails, also on a busy machine."""


class Process:
    """A running `nearfar serve`."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "nearfar", "serve", *map(str, arguments), "--port", "0"]
        # Errors of the server go to the test's own stderr, which pytest shows if the test fails.
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.welcome = self.process.stdout.readline() + self.process.stdout.readline()
        found = re.search(r"at (https?://\S+)", self.welcome)
        assert found, self.welcome
        self.url = found[1]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; gives the exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


Serve = Callable[..., Process]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Process] = []

    def start(*arguments: str | Path) -> Process:
        made.append(Process(*arguments))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


@pytest.fixture(scope="module")
def artifact(built: Built) -> Path:
    return built("stories260K", "none") / "cpu"


def nearfar(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearfar", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def events(lines: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


BODY = {"model": "stories260K", "prompt": [1], "max_tokens": 199, "temperature": 0}


def test_the_golden_text_through_the_server(serve: Serve, artifact: Path) -> None:
    server = serve(artifact, "--threads", "1")
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    made = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE).json()
    assert made["choices"][0]["text"].strip() == golden.strip()
    assert "curl http://127.0.0.1:" in server.welcome
    assert httpx.get(f"{server.url}/ready", timeout=PATIENCE).status_code == 200
    top = nearfar("top", server.url, "--once")
    assert "1 ok" in top.stdout, top.stderr
    assert server.end() == 0


def test_a_private_request_goes_to_this_users_server_on_this_machine_only(
    serve: Serve, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay (ssh, a container's published port) to a server elsewhere answers at this machine's address."""
    homes = [str(tmp_path / name) for name in ("here", "there")]
    servers = []
    for home in homes:
        monkeypatch.setenv("NEARFAR_HOME", home)
        servers.append(serve(artifact, "--threads", "1"))
    monkeypatch.setenv("NEARFAR_HOME", homes[0])
    ports = [int(server.url.rpartition(":")[2]) for server in servers]
    relays = [Proxy(ports[1]), Proxy(ports[0])]
    elsewhere = "it runs on another machine, as another user, or behind another port"
    for address, refusal in (
        (servers[0].url, "no chat template"),  # the model answered the request, so the error is the model's
        (servers[1].url, elsewhere),
        *((relay.address, elsewhere) for relay in relays),
    ):
        with HybridClient(device=address) as client, pytest.raises(RequestError, match=refusal):
            client.chat.completions.create(
                messages=[{"role": "user", "content": "hi"}], max_tokens=2, x_nearfar={"private": True}
            )
    for relay in relays:
        relay.close()


def test_a_program_can_be_pinned(serve: Serve, artifact: Path) -> None:
    (program,) = (each["name"] for each in json.loads((artifact / "manifest.json").read_text())["programs"])
    server = serve(artifact, "--threads", "1", "--program", program)
    metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    assert re.search(rf'program_info\{{.*program="{program}",why="pinned"\}} 1.0', metrics), metrics
    unknown = commands.nearfar("serve", artifact, "--program", "f64")
    assert unknown.returncode == 1
    assert "f64" in unknown.stderr
    assert program in unknown.stderr


def test_the_grammar_compiler_runs_before_it_is_asked_for(serve: Serve, artifact: Path) -> None:
    server = psutil.Process(serve(artifact, "--threads", "1").process.pid)
    deadline = time.monotonic() + PATIENCE
    while not descendants_that_run(server, "grammars.child"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_front_starts_before_the_servers_behind_it(serve: Serve) -> None:
    server = serve("http://127.0.0.1:1", "http://127.0.0.1:2/v1")
    assert "as soon as an upstream server lists a model" in server.welcome
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
    assert httpx.get(f"{server.url}/ready", timeout=PATIENCE).status_code == 503
    assert server.end() == 0


def test_sigterm_lets_streams_finish_and_a_deadline_ends_them(serve: Serve, artifact: Path) -> None:
    for drain, finished in (("120", True), ("0", False)):
        server = serve(artifact, "--threads", "1", "--drain", drain, "--log-format", "json")
        count = 120 if finished else 500
        body = {**BODY, "max_tokens": count, "stream": True, "ignore_eos": True, "logprobs": 20, "n": 4}
        lines = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                if not lines:
                    server.process.send_signal(signal.SIGTERM)
                lines.append(line)
        assert server.process.wait(PATIENCE) == 0
        ends = {c["finish_reason"] for e in events(lines) for c in e.get("choices", ()) if c["finish_reason"]}
        if finished:
            assert ends == {"length"}
            assert "data: [DONE]" in lines
        else:
            assert "shutting down" in events(lines)[-1]["error"]["message"]


def test_keys_and_addresses(serve: Serve, artifact: Path, tmp_path: Path) -> None:
    open_ = commands.nearfar("serve", artifact, "--host", "0.0.0.0")
    assert open_.returncode == 1
    assert "--keys" in open_.stderr
    file = tmp_path / "keys.toml"
    made = nearfar("keys", file, "alice", "--concurrent", "2")
    secret = made.stdout.strip()
    assert secret.startswith("nf-"), made.stderr
    assert secret not in file.read_text()
    server = serve(artifact, "--threads", "1", "--keys", file, "--host", "0.0.0.0", "--name", "story")
    local = re.sub(r"//0\.0\.0\.0", "//127.0.0.1", server.url)
    assert httpx.get(f"{local}/v1/models", timeout=PATIENCE).status_code == 401
    allowed = httpx.get(f"{local}/v1/models", timeout=PATIENCE, headers={"Authorization": f"Bearer {secret}"})
    assert [model["id"] for model in allowed.json()["data"]] == ["story"]
    assert server.end(signal.SIGINT) == 0


def test_https(serve: Serve, artifact: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run(command, check=True, capture_output=True)
    server = serve(artifact, "--threads", "1", "--tls-cert", cert, "--tls-key", key)
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(cert))
    assert httpx.get(f"{server.url}/ready", verify=context, timeout=PATIENCE).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/ready", timeout=PATIENCE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["no/such/model", "--engine", "artifact"],
            "no/such/model is not a file or folder here, not in the store",
        ),
        (["no-such-model"], "no-such-model is not a file or folder here, not in the store"),
        (["someone/model:Q4_0", "--engine", "torch"], "leave --engine torch out, and nearfar builds it"),
        (["http://127.0.0.1:1", "folder"], "one or several URLs"),
        (["folder", "--engine", "gpu"], "--engine must be"),
        (["folder", "--tls-cert", "x.pem"], "belong together"),
        (["http://127.0.0.1:1", "--program", "f32"], "--program"),
        (["folder", "--engine", "torch", "--program", "f32"], "--program"),
    ],
)
def test_what_cannot_be_served_is_said(arguments: list[str], message: str) -> None:
    done = commands.nearfar("serve", *arguments)
    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
