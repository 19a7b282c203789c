"""Names of the hub without a network, and misspelt paths that look like such names."""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from huggingface_hub import constants

from nearfar.errors import CheckpointError
from nearfar.hub import check_there, no_path, snapshot, text_of, waits
from nearfar.hub import reach as hub_reach
from tests.support.commands import nearfar

HOST = "hub.invalid"
COMMANDS = (
    ["run", "smollm2:135m", "hi"],
    ["chat", "owner/name"],
    ["pull", "qwen3:0.6b"],
    ["pull", "owner/name-GGUF:Q4_K_M"],
    ["serve", "owner/name", "--engine", "artifact"],
    ["serve", "owner/name", "--engine", "torch"],
    ["web", "smollm2:135m"],
    ["build", "owner/name", "-o", "out"],
)


@pytest.fixture(autouse=True)
def dark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Make no name of another machine resolve; gives the names that were looked up."""
    asked: list[str] = []

    def nothing(host: str, *_: object, **__: object) -> object:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    monkeypatch.setattr(constants, "ENDPOINT", f"https://{HOST}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_reach, "_known", {})
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_without_a_network_a_name_of_the_hub_fails_at_once(arguments: list[str], tmp_path: Path) -> None:
    begun = time.monotonic()
    done = nearfar(*arguments, NEARFAR_HOME=str(tmp_path / "home"))
    told = " ".join(done.stderr.split())
    assert done.returncode == 1, told
    assert f"{HOST} cannot be reached from here (its name is not found)" in told
    assert "nearfar list" in told
    assert "Building" not in told  # no build has begun
    assert "what has arrived" not in told
    assert "Errno" not in told
    assert time.monotonic() - begun < 10  # the hub's client itself tried for 31 s on a quiet machine


def test_without_a_network_an_address_of_artifacts_fails_at_once(tmp_path: Path) -> None:
    done = nearfar("run", "https://host.invalid/tales/", "hi", NEARFAR_HOME=str(tmp_path / "home"))
    told = " ".join(done.stderr.split())
    assert "manifest.json cannot be fetched (its name is not found): check the address" in told
    assert "Errno" not in told
    assert "has arrived" not in told
    assert not [*tmp_path.rglob("begun.json")]


def test_without_the_hubs_client_others_say_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert check_there("owner/name") is None
    assert text_of("owner/name", "config.json") is None
    assert no_path("owner/name") is None


def test_what_is_waited_for_is_shown() -> None:
    shown: list[str] = []
    before = waits.set(lambda text: shown.append(text) or nullcontext())  # type: ignore[func-returns-value]
    try:
        with pytest.raises(CheckpointError, match="cannot be reached"):
            text_of("owner/name", "config.json")
    finally:
        waits.reset(before)
    assert shown == [f"asking {HOST}"]


def test_the_host_is_asked_once(dark: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointError, match="cannot be reached from here"):
            snapshot("owner/name", ["*"])
    assert dark == [HOST]


def test_what_is_in_the_cache_is_found_without_a_network(tmp_path: Path) -> None:
    revision = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123"
    revision.mkdir(parents=True)
    refs = tmp_path / "hub" / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    (revision / "config.json").write_text("{}")
    assert text_of("owner/name", "config.json") == b"{}"
    assert text_of("owner/name", "other.json") is None
    assert snapshot("owner/name", ["*"]) == revision


def test_offline_by_setting_is_said_so(monkeypatch: pytest.MonkeyPatch, dark: list[str]) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match="HF_HUB_OFFLINE is set, and owner/name has not been downloaded"
    ):
        snapshot("owner/name", ["*"])
    assert dark == []


@pytest.mark.parametrize("variable", ["https_proxy", "HTTPS_PROXY", "ALL_PROXY"])
def test_behind_a_proxy_the_proxy_is_tried_and_named(
    variable: str, monkeypatch: pytest.MonkeyPatch, dark: list[str]
) -> None:
    monkeypatch.setenv(variable, "http://user:secret@proxy.invalid:3128")
    told = f"{HOST} cannot be reached through the proxy proxy.invalid:3128 (its name is not found)"
    assert hub_reach.unreachable() == told
    assert dark == ["proxy.invalid"]
    monkeypatch.setattr(hub_reach, "_known", {})
    monkeypatch.setenv("NO_PROXY", HOST)
    assert hub_reach.unreachable() == f"{HOST} cannot be reached from here (its name is not found)"


def test_behind_a_proxy_that_answers_a_name_that_is_not_found_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, dark: list[str]
) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: socket.socket())
    monkeypatch.setenv("HTTPS_PROXY", "proxy.invalid:3128")
    assert hub_reach.unreachable() is None


def test_a_command_behind_a_dead_proxy_fails_at_once(tmp_path: Path) -> None:
    done = nearfar("run", "smollm2:135m", "hi", NEARFAR_HOME=str(tmp_path), HTTPS_PROXY="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "cannot be reached through the proxy 127.0.0.1:1 (" in " ".join(done.stderr.split())


def test_a_host_that_is_silent_is_waited_for_as_long_as_the_client_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def silent(*_: object, **__: object) -> object:
        over.wait(60)
        raise AssertionError

    monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setattr(hub_reach, "PATIENCE", 0.1)
    assert hub_reach.unreachable() == f"{HOST} cannot be reached from here (no answer in 0.1 s)"
    over.set()


def test_a_host_that_answers_is_asked_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(hub_reach, "_known", {})
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub_reach.unreachable() is None
    monkeypatch.setattr(hub_reach, "_known", {})
    told = hub_reach.unreachable()
    assert told is not None
    assert told.endswith("cannot be reached from here (the connection is refused)")


MISSPELT = "out/sampel is not there: did you mean out/sample?"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "out/sampel", "hi"], MISSPELT),
        (["chat", "out/sampel"], MISSPELT),
        (["pull", "out/sampel"], MISSPELT),
        (["serve", "out/sampel"], MISSPELT),
        (["web", "out/sampel"], MISSPELT),
        (["build", "out/sampel", "-o", "o"], MISSPELT),
        (["run", "out/else", "hi"], "out/else is not there: out has sample, tales"),
        (["run", "out/sample/webgpu", "hi"], "out/sample/webgpu is not there: out/sample has cpu"),
        (["run", "./outt/sample", "hi"], "./outt/sample is not there: did you mean ./out/sample?"),
        (["run", "otu", "hi"], "not a hub id: did you mean the path out?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_misspelt_path_is_told_as_a_path(
    arguments: list[str], told: str, tmp_path: Path, dark: list[str]
) -> None:
    for folder in ("out/sample/cpu", "out/tales"):
        (tmp_path / folder).mkdir(parents=True)
    done = nearfar(*arguments, NEARFAR_HOME=str(tmp_path / "home"))
    said = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert told in said, said
    assert dark == []


def test_a_name_of_the_hub_goes_before_a_folder_of_its_owner(tmp_path: Path) -> None:
    """This holds if it is a known name, or its files are in the hub's cache."""
    (tmp_path / "Qwen" / "Qwen3-1.7B").mkdir(parents=True)
    done = nearfar("run", "Qwen/Qwen3-0.6B", "hi", NEARFAR_HOME=str(tmp_path / "home"))
    assert f"{HOST} cannot be reached" in done.stderr
    (tmp_path / "hub" / "models--Qwen--Qwen9" / "snapshots" / "0123").mkdir(parents=True)
    (tmp_path / "hub" / "models--Qwen--Qwen9" / "snapshots" / "0123" / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--Qwen--Qwen9" / "refs").mkdir()
    (tmp_path / "hub" / "models--Qwen--Qwen9" / "refs" / "main").write_text("0123")
    done = nearfar("run", "Qwen/Qwen9", "hi", NEARFAR_HOME=str(tmp_path / "home"))
    assert "is not there" not in done.stderr
