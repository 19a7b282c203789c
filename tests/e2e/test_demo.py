"""What `make demo` shows: one model in Python, in a browser's page and behind the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import browser
from tests.support.paths import ROOT


def test_the_demo_answers_everywhere(tmp_path: Path) -> None:
    browser.chromium()
    if not (ROOT / "web" / "dist" / "page").is_dir():
        pytest.skip("the page is not built (run `make setup`)")
    command = [sys.executable, "examples/demo.py", "--out", str(tmp_path), "--max-tokens", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [part.splitlines() for part in done.stdout.split("\n── ")[1:]]
    assert [lines[0].split(",")[0] for lines in shown] == ["Python", "Chromium", "Fallback server"]
    python, page, _ = ("".join(lines[1:]) for lines in shown)
    assert len(python) > 10
    assert page.split()[:8] == python.split()[:8], "the same model, the same text"
