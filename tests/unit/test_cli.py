"""The list of commands."""

from __future__ import annotations

import os
import subprocess
import sys

from nearfar.cli import COMMANDS

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
