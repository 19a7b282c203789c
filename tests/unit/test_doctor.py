"""`nearfar doctor`: what works on this machine, what is missing, and how to get it."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from nearfar.cli import examination as doctor
from nearfar.cli.examination import examine, known_settings, requirements
from tests.support.commands import nearfar
from tests.support.paths import ROOT


def asked(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return nearfar("doctor", *arguments, **settings)


def test_it_tells_what_there_is_and_that_artifacts_run(tmp_path: Path) -> None:
    done = asked("--json", NEARFAR_HOME=str(tmp_path), NEARFAR_API_KEY="secret", NEARFAR_HOEM="/elsewhere")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["able"] is True
    found: dict[tuple[str, str], dict[str, Any]] = {
        (one["part"], one["name"]): one for one in report["findings"]
    }
    assert found["extras", "edge"]["state"] == "ok"
    assert found["devices", "cpu"]["state"] == "ok"
    assert str(tmp_path) in found["store", "store"]["told"]
    assert found["settings", "NEARFAR_HOME"]["state"] == "ok"
    assert "secret" not in done.stdout
    assert found["settings", "NEARFAR_HOEM"]["state"] == "wrong"
    assert "NEARFAR_HOME" in found["settings", "NEARFAR_HOEM"]["how"]


def test_a_store_that_cannot_be_written_to_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = asked(NEARFAR_HOME=str(tmp_path / "file"))
    assert done.returncode == 0  # an artifact outside of the store runs
    assert "Artifacts can be run here, but no models built and kept by their names: see above." in done.stdout
    assert "cannot be written to" in done.stdout
    assert "set NEARFAR_HOME to a folder" in done.stdout


def test_what_an_extra_lacks_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = metadata.version

    def version(name: str) -> str:
        if name == "wgpu":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "tokenizers" else there(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    edge = next(one for one in examine() if (one.part, one.name) == ("extras", "edge"))
    assert edge.state == "missing"
    assert "wgpu" in edge.told
    assert "(here is 0.1)" in edge.told
    assert edge.how == "pip install 'nearfar[edge]'"


def test_extras_are_those_of_the_package() -> None:
    assert set(doctor.USES) <= set(metadata.metadata("nearfar").get_all("Provides-Extra") or ())
    assert "psutil" in {one.name for one in requirements("edge")}
    assert {one.name for one in requirements("vulkan")} >= {"vulkan", "wgpu"}, "the extras within are counted"
    assert all(isinstance(one, Requirement) for one in requirements("build"))


def test_settings_are_found_in_the_code() -> None:
    assert known_settings() >= {"NEARFAR_HOME", "NEARFAR_TRUST", "NEARFAR_READY", "NEARFAR_API_KEY"}


def test_what_make_setup_installs_has_no_torch_and_nothing_for_tests() -> None:
    """`make setup` installs only the packages for running and building models: about 1.1 GB, instead of 3.9
    GB for all extras.
    """
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = re.search(r"^USER_EXTRAS := (.+)$", makefile, re.MULTILINE)
    assert extras is not None
    installed = {one.name for extra in extras[1].split(",") for one in requirements(extra)}
    assert installed >= {"apache-tvm", "wgpu", "fastapi", "llguidance"}
    assert not installed & {
        "torch",
        "ray",
        "mlx",
        "xgrammar",
        "pytest",
        "mkdocs",
        "playwright",
        "onnxruntime",
    }
