"""`nearfar inspect` of artifacts that lack something or are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.commands import nearfar


def test_what_is_optional_may_be_absent(tmp_path: Path) -> None:
    path = tiny.write_artifact(tmp_path / "tiny")
    shown = nearfar("inspect", path)
    assert shown.returncode == 0, shown.stderr
    assert "not stated" in shown.stdout
    report = json.loads(nearfar("inspect", path, "--json").stdout)
    assert report["license"] == "not stated"
    assert report["programs"][0]["launches_per_token"] == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "manifest.json").write_text("[]"), "not the manifest of a nearfar artifact"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "nested too deeply"),
        (
            lambda path: (path / "manifest.json").write_text('{"format": "nearfar-artifact", "version": 3}'),
            "as the build wrote",
        ),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff"), "cannot be read"),
        (lambda path: (path / "plans/f32/step.1.json").write_text("[" * 100_000), "nested too deeply"),
        (lambda path: (path / "plans/f32/step.1.json").unlink(), "is missing"),
    ],
)
def test_a_broken_artifact_is_named_without_a_traceback(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    path = tiny.write_artifact(tmp_path / "tiny")
    damage(path)
    shown = nearfar("inspect", path)
    assert shown.returncode == 1
    assert said in " ".join(shown.stderr.split())
    assert "Traceback" not in shown.stderr
