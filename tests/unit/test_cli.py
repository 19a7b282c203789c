"""The list of commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearfar.cli import COMMANDS
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
    # Nothing that widens, narrows or colours the list.
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
            "Invalid value for '--port': Input should be less than or equal to 65535",
        ),
        (["keys", "no/such/folder/keys", "me"], 1, "keys.new: No such file or directory: check the path"),
    ],
)
def test_what_is_wrong_is_a_sentence(arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    done = nearfar(*arguments, NEARFAR_HOME=str(tmp_path))
    told = " ".join(done.stderr.replace("│", " ").split())
    assert (done.returncode, said in told) == (code, True), told
    assert "Traceback" not in done.stderr


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
