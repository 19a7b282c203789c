"""Ctrl-C in the first moments of a command, during its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")
def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-c", "from nearfar.cli import app"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (130, "stopped\n")


def test_an_import_leaves_ctrl_c_as_it_was() -> None:
    from nearfar.cli import starting

    assert signal.getsignal(signal.SIGINT) is not starting._end
