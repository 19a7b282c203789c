"""Commands' messages about wrong words name the value and the possible ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import nearfar

CASES: tuple[tuple[list[str], str], ...] = (
    (["run", "m", "hi", "--temperature", "hot"], "it must be a number, not 'hot'"),
    (["run", "m", "hi", "--seed", "x"], "it must be a whole number, not 'x'"),
    (["serve", "m", "--port", "http"], "it must be a whole number, not 'http'"),
    (["serve", "m", "--port", "99999"], "it must be at most 65535, not '99999'"),
    (["web", "m", "--port", "-1"], "it must be at least 0, not '-1'"),
    (["keys", "{there}/no/k.toml", "bob"], "the keys file {there}/no/k.toml cannot be written"),
    (["top", "nonsense", "--once"], "nonsense is not the address of a server: give http://"),
    (["build", "{there}/built", "-o", "{there}/x"], "{there}/built is what nearfar build wrote"),
    (["build", "{there}", "-o", "{there}/x"], "{there} is what nearfar build wrote"),
    (["run", "{there}/built", "hi"], "manifest.json is not a manifest (it names no target)"),
)


@pytest.mark.parametrize(("words", "said"), CASES)
def test_a_wrong_word_is_named(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "manifest.json").write_text("{}")
    done = nearfar(
        *(word.format(there=tmp_path) for word in words), NEARFAR_HOME=str(tmp_path / "home"), COLUMNS="300"
    )
    told = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode in (1, 2)
    assert said.format(there=tmp_path) in told, told
    assert ".new." not in told


@pytest.mark.parametrize("command", [["list"], ["rm", "x"], ["run", "{there}/model", "hi"]])
def test_a_home_that_is_a_file_is_named(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "home").write_text("")
    words = [word.format(there=tmp_path) for word in command]
    done = nearfar(*words, NEARFAR_HOME=str(tmp_path / "home"))
    assert done.returncode == 1
    assert f"{tmp_path}/home is a file" in " ".join(done.stderr.split())
