"""Native code of strangers does not run unasked: artifacts that were built or trusted here, and others,
through the real commands.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from nearfar.edge_runtime import Artifact, Engine
from nearfar.edge_runtime.artifact.trust import remember
from nearfar.errors import ArtifactError, NearfarWarning
from nearfar.folders import data_folder
from tests.shared_data import shared_data
from tests.support import tiny
from tests.support.backends import Lab
from tests.support.paths import ROOT

REFUSAL = r"downloaded holds native code \(model\.so\), .* the list \S+trusted .* does not say.*stories260K.*--trust .*trust=True.*nearfar build"  # noqa: E501


@pytest.fixture
def made(lab: Lab) -> Path:
    """A CPU artifact built by somebody else, before this user's home exists."""
    return lab.artifact("stories", "cpu")


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has built and trusted nothing yet."""
    monkeypatch.delenv("NEARFAR_TRUST", raising=False)
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def artifact(made: Path, home: Path, tmp_path: Path) -> Path:
    """A copy of the foreign artifact."""
    return Path(shutil.copytree(made, tmp_path / "downloaded"))


def load(artifact: Path, **options: bool) -> str:
    with Engine.load(artifact, kv_memory="32MB", threads=1, **options) as engine:
        return engine.completions.create("Once", max_tokens=4, temperature=0).choices[0].text


def command(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nearfar", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_downloaded_library_runs_only_once_it_is_trusted(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=REFUSAL):
        load(artifact)
    text = load(artifact, trust=True)
    assert load(artifact) == text, "it was noted"
    moved = artifact.rename(tmp_path / "moved")
    assert load(moved) == text, "wherever it lies"


@pytest.mark.parametrize("verify", [True, False])
def test_an_altered_library_is_not_the_one_that_was_trusted(artifact: Path, verify: bool) -> None:
    load(artifact, trust=True)
    (library,) = artifact.glob("kernels/*/model.so")
    code = library.read_bytes()
    library.unlink()  # the file is replaced, not changed, because the process has it loaded
    library.write_bytes(code + b"\0")
    with pytest.raises(ArtifactError, match=r"model.so is corrupt|holds native code"):
        load(artifact, verify=verify)


@pytest.mark.parametrize("verify", [True, False])
def test_an_altered_manifest_is_not_the_one_that_was_trusted(artifact: Path, verify: bool) -> None:
    """Whoever wrote an artifact also wrote the hashes in it."""
    load(artifact, trust=True)
    tiny.edit_manifest(artifact, lambda manifest: manifest.update(license="another"))
    with pytest.raises(ArtifactError, match="holds native code"):
        load(artifact, verify=verify)


def test_a_container_may_trust_all(artifact: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARFAR_TRUST", "1")
    assert load(artifact)
    assert not home.exists(), "nothing is noted"


def test_what_is_built_here_is_trusted_here(home: Path, tmp_path: Path) -> None:
    built = command(
        "build",
        shared_data("models", "stories260K"),
        "--target",
        "cpu",
        "--quant",
        "none",
        "--cpu-features",
        "native",
        "-o",
        tmp_path / "out",
    )
    assert built.returncode == 0, built.stderr
    assert load(tmp_path / "out")
    copied = Path(shutil.copytree(tmp_path / "out" / "cpu", tmp_path / "copied"))
    assert load(copied)
    assert (data_folder() / "trusted").read_text().count("\n") == 1


def test_commands_ask_and_take_the_answer(artifact: Path) -> None:
    options = ("--raw", "--max-tokens", 4, "--temperature", 0, "--threads", 1, "--kv-memory", "32MB")
    refused = command("run", artifact, "Once", *options)
    assert refused.returncode == 1
    assert "holds native code" in refused.stderr
    assert refused.stdout == ""
    serve = command("serve", artifact, "--port", 0)
    assert serve.returncode == 1
    assert "holds native code" in serve.stderr
    allowed = command("run", artifact, "Once", *options, "--trust")
    assert allowed.returncode == 0, allowed.stderr
    assert command("run", artifact, "Once", *options).stdout == allowed.stdout


def test_where_nothing_can_be_noted_it_says_so_and_runs(artifact: Path, home: Path) -> None:
    home.write_text("no directory")
    with pytest.warns(NearfarWarning, match="cannot note that .*downloaded is trusted"):
        assert load(artifact, trust=True)
    with pytest.raises(ArtifactError, match="holds native code"):
        load(artifact)


def test_shaders_are_not_native_code(lab: Lab, home: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remember(lab.artifact("stories", "vulkan"))
    assert not home.exists()
    assert Artifact.open(lab.artifact("stories", "vulkan")).target == "vulkan"
    assert os.environ.get("NEARFAR_TRUST") is None
