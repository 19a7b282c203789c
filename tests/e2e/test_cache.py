"""`nearfar cache` and `--cache` as a user runs them, each time in a new process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearfar.build.pipeline import BuildOptions, build
from tests.e2e.test_run import nearfar
from tests.shared_data import shared_data
from tests.support.artifacts import Built

FOX = "You tell stories of the fox and the crow, of the lion and the mouse, and of the tortoise and the hare. " * 4
GREEDY = ("--temperature", 0, "--max-tokens", 16)


@pytest.fixture(scope="module")
def classics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("classics")
    build(BuildOptions(str(shared_data("models", "classics-1M")), out, ("cpu",), "none"))
    return out


@pytest.fixture(scope="module")
def snapshot(classics: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapshots") / "fox.snap"
    done = nearfar("cache", "save", classics, "--system", FOX, "-o", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert "tokens, " in done.stderr.decode()
    assert "float32 keys and values of classics-1M (not quantized" in done.stderr.decode()
    return path


def test_run_with_a_snapshot_answers_as_without(classics: Path, snapshot: Path) -> None:
    question = ("run", classics, "Who came?", "--system", FOX, "--stats", *GREEDY)
    plain, cached = nearfar(*question), nearfar(*question, "--cache", snapshot)
    assert cached.stdout == plain.stdout != b""
    assert b"cached)" not in plain.stderr
    assert b"cached)" in cached.stderr
    other = nearfar("run", classics, "Who came?", *GREEDY, "--cache", snapshot)
    assert other.returncode == 0
    assert b"saved nothing: the prompt does not begin as it does" in other.stderr


def test_load_goes_on_from_the_snapshot(classics: Path, snapshot: Path) -> None:
    loaded = nearfar("cache", "load", classics, snapshot, "Who came?", *GREEDY)
    assert loaded.stdout == nearfar("run", classics, "Who came?", "--system", FOX, *GREEDY).stdout
    assert b"system: You tell stories of the fox" in loaded.stderr
    assert b"cached)" in loaded.stderr
    shown = nearfar("cache", "load", classics, snapshot)
    assert (shown.returncode, shown.stdout) == (0, b"")


def test_chat_with_a_snapshot(classics: Path, snapshot: Path) -> None:
    chat = ("chat", classics, "--system", FOX, "--stats", *GREEDY)
    plain, cached = (nearfar(*chat, *more, stdin=b"Who came?\n") for more in ([], ["--cache", snapshot]))
    assert cached.stdout == plain.stdout != b""
    assert b"cached)" in cached.stderr


def test_raw_text_and_messages(classics: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(FOX, encoding="utf-8")
    assert nearfar("cache", "save", classics, "--raw", "--file", tmp_path / "text.txt", "-o", tmp_path / "raw").returncode == 0
    expected = nearfar("run", classics, FOX + "And so", "--raw", *GREEDY).stdout
    cached = nearfar("run", classics, FOX + "And so", "--raw", "--stats", "--cache", tmp_path / "raw", *GREEDY)
    assert (cached.stdout, b"cached)" in cached.stderr) == (expected, True)
    assert nearfar("cache", "load", classics, tmp_path / "raw", "And so", *GREEDY).stdout == expected
    shots = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": FOX}]
    (tmp_path / "shots.json").write_text(json.dumps(shots))
    saved = nearfar("cache", "save", classics, "--messages", tmp_path / "shots.json", "-o", tmp_path / "shots")
    assert saved.returncode == 0, saved.stderr
    assert nearfar("cache", "load", classics, tmp_path / "shots", "And then?", *GREEDY).stdout


def test_refusals(classics: Path, snapshot: Path, built: Built, tmp_path: Path) -> None:
    data = bytearray(snapshot.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "altered").write_bytes(data)
    (tmp_path / "cut").write_bytes(snapshot.read_bytes()[:-5000])
    (tmp_path / "newer").write_bytes(snapshot.read_bytes().replace(b'"version":"1"', b'"version":"7"', 1))
    (tmp_path / "notes").write_text("mine")
    save = ("cache", "save", classics, "-o", tmp_path / "new")
    for arguments, message in [
        (("cache", "load", built("stories260K", "none") / "cpu", snapshot), "this model is stories260K (not quantized; checkpoint"),
        (("run", classics, "Hi", "--cache", tmp_path / "altered"), "is damaged: SHA-256"),
        (("chat", classics, "--cache", tmp_path / "cut"), "is truncated"),
        (("cache", "load", classics, tmp_path / "newer"), "version 7, newer than this nearfar understands (1)"),
        (("cache", "load", classics, tmp_path / "notes"), "is not a snapshot of nearfar"),
        (("cache", "load", classics, tmp_path / "absent"), "No such file"),
        (("cache", "load", classics, snapshot, "--kv-memory", "100kB"), "fit the context here"),
        (("cache", "save", classics, "--system", FOX, "-o", tmp_path / "notes"), "is not a snapshot, so it is not overwritten"),
        ((*save, "--system", "Hi"), "a snapshot needs at least a page of 16"),
        (save, "give one of --system, --file, --messages and --prompt, not none"),
        ((*save, "--raw", "--system", "Hi"), "--system needs the chat template"),
        ((*save, "--messages", tmp_path / "notes"), "is not JSON"),
        ((*save, "--file", tmp_path / "absent"), "cannot read"),
    ]:
        done = nearfar(*arguments)
        assert (done.returncode, done.stdout) == (1, b""), arguments
        assert done.stderr.decode().startswith("error: "), arguments
        assert message in done.stderr.decode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["altered", "cut", "newer", "notes"]
