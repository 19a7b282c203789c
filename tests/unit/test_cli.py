"""The list of commands."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from nearfar.cli import COMMANDS, app
from nearfar.cli import examination as doctor
from nearfar.cli.examination import Finding
from nearfar.errors import NearfarWarning
from tests.support.commands import nearfar

LIST = """
import sys
from nearfar.cli import typer_app
try:
    typer_app(["--help"])
finally:
    print("imported:", *sorted({"tvm", "torch", "numpy", "fastapi", "httpx"} & set(sys.modules)))
"""


def test_the_list_names_every_command_and_imports_none_of_them() -> None:
    # The environment has no variable that widens, narrows or colours the list.
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ} | {
        "COLUMNS": "120"
    }
    done = subprocess.run(
        [sys.executable, "-c", LIST], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    listed = [
        line.split()[1]
        for line in done.stdout.splitlines()
        if line.startswith("│ ") and len(line.split()) > 2
    ]
    assert [name for name in listed if not name.startswith("-")] == list(COMMANDS)
    assert done.stdout.splitlines()[-1].split() == ["imported:"]


WITHOUT_HTTPX = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "httpx":
            raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

sys.meta_path.insert(0, Absent())
from nearfar.cli import app
sys.argv[0] = "nearfar"
app()
"""


def test_a_command_of_a_group_says_what_it_lacks_and_its_neighbour_works() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_HTTPX, "bench", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    lacking = run("serve", "http://127.0.0.1:1")
    assert lacking.returncode == 1
    assert "`nearfar bench serve` needs httpx" in " ".join(lacking.stderr.split())
    assert "pip install 'nearfar[server]'" in " ".join(lacking.stderr.split())
    assert run("kernels", "--help").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["rnu", "x"], 2, "there is no command rnu: did you mean run?"),
        (["frobnicate"], 2, "there is no command frobnicate: there are build, inspect, run"),
        (["list", "--jsno"], 2, "No such option: --jsno"),
        (
            ["serve", "x", "--port", "70000"],
            2,
            "Invalid value for '--port': it must be at most 65535, not '70000'",
        ),
        (["keys", "keys.toml", "bad name!"], 1, "'bad name!' is not a name for a key"),
        (["route", "score"], 1, 'give one prompt, as in nearfar route score "Why is the sky blue?"'),
        (
            ["keys", "no/such/folder/keys", "me"],
            1,
            "the keys file no/such/folder/keys cannot be written: No such",
        ),
    ],
)
def test_what_is_wrong_is_a_sentence(arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    done = nearfar(*arguments, NEARFAR_HOME=str(tmp_path))
    told = " ".join(done.stderr.replace("│", " ").split())
    assert (done.returncode, said in told) == (code, True), told
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", [("build",), ("serve",), ("cache", "save"), ("route", "score")], ids=" ".join
)
def test_help_fits_a_narrow_terminal(command: tuple[str, ...]) -> None:
    done = nearfar(*command, "--help", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    names = {word for line in lines if line.startswith("   -") for word in line.replace(",", " ").split()}
    assert {"--help", *WHOLE.get(command[0], ())} <= names
    texts = [line for line in lines if line.startswith("        ")]
    assert max(map(len, lines)) <= 80
    assert max(map(len, texts)) > 50  # before, the texts had 18 columns


WHOLE = {
    "serve": ("--upstream-continues", "--no-upstream-salts", "--tls-client-ca"),
    "build": ("--output", "--kernel-figures", "--no-kernel-cache"),
}


def test_one_prompt_is_scored() -> None:
    done = nearfar("route", "score", "What is the capital of France?")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"difficulty": 0.123439}), done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nearfar", "list", "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120,
            env={**os.environ, "NEARFAR_HOME": str(tmp_path)},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: the output cannot be written, the disk is full: free some space")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize("arguments", [("--help",), ("list", "--json")], ids=" ".join)
def test_a_reader_that_has_seen_enough_is_no_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """The reader has closed the pipe: rich and typer would exit with 1, Python itself with 120."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "nearfar", *arguments],
        stdout=write, stderr=subprocess.PIPE, text=True, timeout=120,
        env={**os.environ, "NEARFAR_HOME": str(tmp_path)},
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def in_streams(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    out: io.TextIOWrapper | None,
    err: io.TextIOWrapper | None,
) -> object:
    """The exit code of a command whose output goes to these streams."""
    monkeypatch.setattr(sys, "argv", ["nearfar", *arguments])
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(SystemExit) as end:
        app()
    return end.value.code


def narrow() -> io.TextIOWrapper:
    """A stream in an encoding that is not UTF-8, as Python opens it in such a locale."""
    return io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="strict", write_through=True)


def written(stream: io.TextIOWrapper) -> bytes:
    """The bytes that a stream was given."""
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue()


def test_signs_that_the_locale_lacks_are_written_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding("devices", "h\u00f6me-\u4e2d", "missing", "nothing\u2026", "get it")
    monkeypatch.setattr(doctor, "examine", lambda: iter([found]))
    out, err = narrow(), narrow()
    assert in_streams(monkeypatch, ["doctor"], out, err) == 1
    told = written(out).decode("latin-1")
    assert "          -> get it" in told
    assert "h\u00f6me-?: nothing..." in told
    out = narrow()
    in_streams(monkeypatch, ["doctor", "--json"], out, err)
    assert json.loads(written(out))["findings"][0]["told"] == "nothing\u2026"
    assert written(err) == b""


def test_a_warning_of_ours_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    in_streams(monkeypatch, ["--version"], narrow(), narrow())
    told = warnings.formatwarning(NearfarWarning("cannot note it"), NearfarWarning, "trust.py", 32)
    assert told == "note: cannot note it\n"
    assert "trust.py:32" in warnings.formatwarning(UserWarning("hm"), UserWarning, "trust.py", 32)


def test_without_stdout_a_command_does_what_it_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For example after >&- in a shell: Python then has None for the stream."""
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path))
    for arguments in (["list"], ["list", "--json"], ["synth", "--list"]):
        assert in_streams(monkeypatch, arguments, None, None) == 0
    monkeypatch.setattr(sys, "stdin", None)
    err = narrow()
    assert in_streams(monkeypatch, ["run", "no-model"], None, err) == 1
    assert b"the prompt is empty" in written(err)


@pytest.mark.parametrize("place", ["file", "file/below"])
@pytest.mark.parametrize("command", ["build", "cp", "synth"])
def test_an_output_that_is_a_file_is_a_sentence(
    command: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    arguments = {
        "build": ("build", "no/such-model", "-o", tmp_path / place),
        "cp": ("cp", "no-such-model", tmp_path / place),
        "synth": ("synth", "ernie-4.5-0.3b", "-o", tmp_path / place),
    }[command]
    done = nearfar(*arguments, NEARFAR_HOME=str(tmp_path / "home"))
    assert done.returncode == 1
    assert f"{tmp_path / 'file'} is a file: choose a directory for the output" in " ".join(
        done.stderr.split()
    )
