"""The snippets of the pages about usage do what the pages say, with the sample model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import docs
from tests.support.artifacts import Built
from tests.support.paths import ROOT

# Pages, and how many of their Python fences are run in one go (None: all).
PYTHON = {
    "README.md": None,
    "docs/python.md": None,
    "docs/routing.md": None,
    "docs/server.md": None,
    "docs/snapshots.md": None,
    "docs/structured-output.md": None,
    # the other fences need an exported function: tests/device/test_mlx_artifact.py runs them
    "docs/mac.md": 1,
}
NEEDS = {"docs/mac.md": "mlx_lm", "docs/server.md": "openai", "docs/structured-output.md": "llguidance"}
SHELL = ("docs/try.md", "docs/store.md", "docs/targets.md", "docs/snapshots.md", "docs/structured-output.md")
# Commands that end by themselves and need no more than an artifact.
ENDING = re.compile(r"(?:\.venv/bin/)?nearfar (?:(?:run|inspect|cache save|cache load) out/|devices)")
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def folder(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: the sample model as out/sample, and under the name of the other model that pages
    build.
    """
    root = tmp_path_factory.mktemp("reader")
    (root / "out").mkdir()
    made = built.of(ROOT / "examples" / "sample-model", "q4", "cpu", "mlx", "onnx", "vulkan")
    for name in ("sample", "smollm2"):
        (root / "out" / name).symlink_to(made)
    (root / "system.txt").write_text("You tell short stories about animals. " * 12)
    (root / "cat.schema.json").write_text('{"type": "object", "properties": {"name": {"type": "string"}}}')
    (root / "bin").mkdir()
    command = root / "bin" / "nearfar"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m nearfar "$@"\n')
    command.chmod(0o755)
    return root


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The address of a server for the artifact, for the pages that call one."""
    command = [
        sys.executable,
        "-m",
        "nearfar",
        "serve",
        "out/sample/cpu",
        "--port",
        "0",
        "--name",
        "sample-model",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as server:
        try:
            assert server.stdout is not None
            found = next(
                filter(None, (re.search(r"http://[\d.]+:\d+", line) for line in server.stdout)), None
            )
            assert found, "nearfar serve ended without naming its address"
            yield found[0]
        finally:
            server.terminate()


@pytest.mark.parametrize("name", PYTHON)
def test_the_python_of_a_page_runs(name: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """All fences of a page run in order, as a reader would type them, with nothing before them."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    text = "\n".join(docs.page(name).fences("python")[: PYTHON[name]])
    assert text
    if ADDRESS in text:
        text = text.replace(ADDRESS, request.getfixturevalue("address"))
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it prints what the page promises"


@pytest.mark.parametrize("name", SHELL)
def test_the_commands_of_a_page_run(name: str, folder: Path) -> None:
    """Runs the commands that end by themselves; tests/unit/test_docs.py checks the names in the other
    commands.
    """
    lines = [line for text in docs.page(name).fences("sh") for line in text.splitlines()]
    ending = [line.replace(".venv/bin/", "") for line in lines if ENDING.match(line)]
    assert ending
    script = "\n".join(["set -euo pipefail", *ending])
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`make docs` in strict mode: every link of a page has a target, and every page is in the navigation."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference" / "python.html").read_text()
    assert "nearfar.edge_runtime.openai.sync.Engine" in reference, "the reference has the public classes"
    commands = (tmp_path / "reference" / "commands.html").read_text()
    assert "--group-size" in commands, "and every option"
    assert (tmp_path / "docs" / "pictures" / "page.png").is_file()
