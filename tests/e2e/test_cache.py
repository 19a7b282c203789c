"""`nearfar cache` and `--cache` as a user runs them, each time in a new process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearfar.cli import typer_app
from nearfar.errors import NearfarError
from tests.e2e.test_run import nearfar
from tests.support.artifacts import Built
from tests.support.paths import ROOT

FOX = (
    "You tell stories of the fox and the crow, of the lion and the mouse, and of the tortoise and the hare. "
    * 4
)
GREEDY = ("--temperature", 0, "--max-tokens", 16)


@pytest.fixture(scope="module")
def sample(built: Built) -> Path:
    return built.of(ROOT / "examples" / "sample-model", "q4", "cpu") / "cpu"


@pytest.fixture(scope="module")
def snapshot(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapshots") / "fox.snap"
    done = nearfar("cache", "save", sample, "--system", FOX, "-o", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert "tokens, " in done.stderr.decode()
    assert "float16 keys and values of sample-model (q4" in done.stderr.decode()
    return path


def test_run_with_a_snapshot_answers_as_without(sample: Path, snapshot: Path) -> None:
    question = ("run", sample, "Who came?", "--system", FOX, "--stats", *GREEDY)
    plain, cached = nearfar(*question), nearfar(*question, "--cache", snapshot)
    assert cached.stdout == plain.stdout != b""
    assert b"cached)" not in plain.stderr
    assert b"cached)" in cached.stderr
    other = nearfar("run", sample, "Who came?", *GREEDY, "--cache", snapshot)
    assert other.returncode == 0
    assert b"saved no time: the prompt does not begin as the snapshot does" in other.stderr


def test_load_goes_on_from_the_snapshot(sample: Path, snapshot: Path) -> None:
    loaded = nearfar("cache", "load", sample, snapshot, "Who came?", *GREEDY)
    assert loaded.stdout == nearfar("run", sample, "Who came?", "--system", FOX, *GREEDY).stdout
    assert b"system: You tell stories of the fox" in loaded.stderr
    assert b"cached)" in loaded.stderr
    shown = nearfar("cache", "load", sample, snapshot)
    assert (shown.returncode, shown.stdout) == (0, b"")


def test_chat_with_a_snapshot(sample: Path, snapshot: Path) -> None:
    chat = ("chat", sample, "--system", FOX, "--stats", *GREEDY)
    plain, cached = (nearfar(*chat, *more, stdin=b"Who came?\n") for more in ([], ["--cache", snapshot]))
    assert cached.stdout == plain.stdout != b""
    assert b"cached)" in cached.stderr


def test_raw_text_and_messages(sample: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(FOX, encoding="utf-8")
    assert (
        nearfar(
            "cache", "save", sample, "--raw", "--file", tmp_path / "text.txt", "-o", tmp_path / "raw"
        ).returncode
        == 0
    )
    expected = nearfar("run", sample, FOX + "And so", "--raw", *GREEDY).stdout
    cached = nearfar("run", sample, FOX + "And so", "--raw", "--stats", "--cache", tmp_path / "raw", *GREEDY)
    assert (cached.stdout, b"cached)" in cached.stderr) == (expected, True)
    assert nearfar("cache", "load", sample, tmp_path / "raw", "And so", *GREEDY).stdout == expected
    shots = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": FOX}]
    (tmp_path / "shots.json").write_text(json.dumps(shots))
    saved = nearfar("cache", "save", sample, "--messages", tmp_path / "shots.json", "-o", tmp_path / "shots")
    assert saved.returncode == 0, saved.stderr
    assert nearfar("cache", "load", sample, tmp_path / "shots", "And then?", *GREEDY).stdout


def test_refusals(sample: Path, snapshot: Path, built: Built, tmp_path: Path) -> None:
    data = bytearray(snapshot.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "altered").write_bytes(data)
    (tmp_path / "notes").write_text("mine")
    save = ("cache", "save", sample, "-o", tmp_path / "new")
    for arguments, message in [
        (
            ("cache", "load", built("stories260K", "none") / "cpu", snapshot),
            "this model is stories260K (not quantized; checkpoint",
        ),
        (("run", sample, "Hi", "--cache", tmp_path / "altered"), "is damaged: SHA-256"),
        (("chat", sample, "--cache", tmp_path / "notes"), "is not a snapshot of nearfar"),
        (("cache", "load", sample, tmp_path / "absent"), "No such file"),
        (("cache", "load", sample, snapshot, "--kv-memory", "150kB"), "fit the context here"),
        (
            ("cache", "save", sample, "--system", FOX, "-o", tmp_path / "notes"),
            "is not a snapshot, so it is not overwritten",
        ),
        ((*save, "--system", "Hi"), "a snapshot needs at least a page of 16"),
        (save, "give one of --system, --file, --messages and --prompt, not none"),
        ((*save, "--raw", "--system", "Hi"), "--system needs the chat template"),
        ((*save, "--messages", tmp_path / "notes"), "is not JSON"),
        ((*save, "--file", tmp_path / "absent"), "cannot read"),
    ]:
        done = CliRunner().invoke(typer_app, [str(argument) for argument in arguments])
        assert isinstance(done.exception, NearfarError), (arguments, done.exception)
        assert message in str(done.exception)
        assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["altered", "notes"]
    refused = nearfar("cache", "load", sample, tmp_path / "altered")
    assert (refused.returncode, refused.stdout) == (1, b"")
    # on a busy machine, the error may come after a message about waiting
    assert b"\nerror: the snapshot " in b"\n" + refused.stderr
