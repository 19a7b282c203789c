"""The output of `make demo`: one model in Python, in a browser's page and behind the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import browser
from tests.support.artifacts import FEW, build_command
from tests.support.paths import ROOT

BUILD = f"demo.BUILD = {build_command(FEW)!r}"
DEMO = f"import sys; sys.path.insert(0, 'examples'); import demo; {BUILD}; demo.main()"
"""The demo with artifacts of few step sizes: compiling the steps of all sizes takes four times as long."""


def test_the_demo_answers_everywhere(tmp_path: Path) -> None:
    browser.chromium()
    if not (ROOT / "web" / "dist" / "page").is_dir():
        pytest.skip("the page is not built (run `make setup`)")
    command = [sys.executable, "-c", DEMO, "--out", str(tmp_path), "--max-tokens", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = {
        lines[0].split(",")[0]: lines[1:]
        for lines in (part.splitlines() for part in done.stdout.split("\n── ")[1:])
    }
    assert list(shown) == [
        "Python", "Chromium", "Fallback server", "A hybrid client between this device and the server",
    ]  # fmt: skip
    python, page, _, routed = shown.values()
    assert answer_to("What is 17 + 25?", python).endswith("= 42")
    assert json.loads(answer_to("As JSON:", python)) == {"name": "Ida", "age": 34, "city": "Oslo"}
    story = answer_to("Tell me a story", python)
    assert len(story) > 10
    assert answer_to("Tell me a story", page) == story, "the same model, the same text"
    routes = [line.split(" → ")[1].split()[0] for line in routed if " → " in line]
    assert routes == ["device", "cloud", "device"]


def answer_to(question: str, lines: list[str]) -> str:
    """The lines printed below a question."""
    at = next(i for i, line in enumerate(lines) if line.startswith(f"> {question}"))
    return lines[at + 1]
