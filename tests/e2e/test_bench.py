"""`nearfar bench serve` against a small server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.limits import ServerLimits
from tests.support.servers import RunningServer, tiny_engine

ENVIRONMENT = {**os.environ, "COLUMNS": "120"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    made = RunningServer(lambda: tiny_engine(tmp_path_factory.mktemp("tiny")))
    yield made
    made.close()


def command(url: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "nearfar", "bench", "serve", url, *map(str, arguments)]


def bench(url: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    made = command(url, *arguments)
    return subprocess.run(made, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)


def requests_so_far(server: RunningServer) -> dict[str, float]:
    text = httpx.get(f"{server.address}/metrics", timeout=10).text
    return {
        name: float(value) for name, value in re.findall(r'requests_total{.*outcome="(\w+)"} (\S+)', text)
    }


def test_closed_and_open_loops(server: RunningServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 200 * i, "input_length": 1024 + 10 * i, "output_length": 60, "hash_ids": [7, i, i + 99]}
        for i in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    done = bench(
        server.address,
        "--mode",
        "both",
        "--concurrency",
        "1,3",
        "--requests",
        6,
        "--rate",
        "20",
        "--trace",
        trace,
        "--scale",
        0.1,
        "--slo-ttft",
        60,
        "--slo-tpot",
        60,
        "--json",
        tmp_path / "r.json",
        "--html",
        tmp_path / "r.html",
    )
    assert done.returncode == 0, done.stderr
    assert "6 of 6" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert [level["name"] for level in report["levels"]] == ["1 at once", "3 at once", "20 a second"]
    for level in report["levels"]:
        assert (level["ok"], level["errors"], level["good"]) == (6, {}, 1.0)
        # With one token for each byte, the shortest word and its blank cost two tokens, so a prompt may lack
        # one token.
        assert level["prompt_error"] <= 1, "prompts have the wanted number of the server's own tokens"
        assert level["prompt_tokens"] == pytest.approx(
            sum(round((1024 + 10 * i) * 0.1) for i in range(6)), abs=6
        )
        assert level["output_tokens"] == 6 * 6
        assert 0 < level["ttft"]["p50"] <= level["ttft"]["p99"] <= level["e2e"]["max"]
    # Prompts share blocks of 51 tokens; the five later requests find three pages of 16 of them.
    assert report["levels"][0]["cached_part"] == pytest.approx(
        5 * 48 / report["levels"][0]["prompt_tokens"], abs=0.02
    )
    html = (tmp_path / "r.html").read_text()
    assert html.count("<svg") == html.count("</svg>") >= 8
    assert not re.search(r'(src|href)="|https?://(?!127\.0\.0\.1)', html), "the page needs no network"


def test_errors_are_counted_by_kind(tmp_path: Path) -> None:
    """The server sometimes also rejects the first requests, which inspect it; these are tried again."""
    limits = AppOptions(limits=ServerLimits(requests=2))
    server = RunningServer(lambda: tiny_engine(tmp_path / "tiny"), limits)
    try:
        done = bench(server.address, "--concurrency", "2,6", "--requests", 12, "--output-tokens", 24,
                     "--prompt-tokens", 20, "--json", tmp_path / "r.json")  # fmt: skip
        assert done.returncode == 0, done.stderr
        free, crowded = json.loads((tmp_path / "r.json").read_text())["levels"]
        assert free["errors"] == {}
        assert list(crowded["errors"]) == ["HTTP 429"]
        assert crowded["ok"] + crowded["errors"]["HTTP 429"] == 12
        assert crowded["good"] < 1
        assert "HTTP 429" in done.stdout
    finally:
        server.close()


def test_ctrl_c_gives_the_results_so_far(server: RunningServer, tmp_path: Path) -> None:
    before = requests_so_far(server)["ok"]
    arguments = command(
        server.address,
        "--concurrency",
        "2",
        "--requests",
        100_000,
        "--api",
        "chat",
        "--output-tokens",
        4,
        "--prompt-tokens",
        30,
        "--json",
        tmp_path / "r.json",
    )
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    deadline = time.monotonic() + 60
    while (
        requests_so_far(server)["ok"] < before + 32 and time.monotonic() < deadline
    ):  # the first 26 requests only measure the prompts
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Stopped early" in out
    report: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert report["interrupted"]
    assert report["levels"][0]["ok"] >= 1
    assert report["levels"][0]["errors"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1"], "cannot be reached"),
        (["http://127.0.0.1:1", "--concurrency", "four"], "numbers with commas"),
        (["http://127.0.0.1:1", "--mode", "ajar"], "closed, open or both"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: list[str], message: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
