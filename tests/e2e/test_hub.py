"""Models by their names on the hub, through the hub's own client, from a server with the hub's interface."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from nearfar.build.weights.hub import choose
from nearfar.errors import CheckpointError
from tests.shared_data import shared_data
from tests.support import gguf_files
from tests.support.hub import Hub, hub


def build(at: Hub, name: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `nearfar build NAME` for mlx, which compiles nothing."""
    command = [sys.executable, "-m", "nearfar", "build", name, "--target", "mlx", "-o", str(home / "out")]
    client = {"HF_ENDPOINT": at.url, "HF_HOME": str(home / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **client, **environment}, timeout=300
    )


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of GGUF files alone: a model in two quantizations, one of them in parts, and files that
    are not models.
    """
    root = tmp_path_factory.mktemp("quantized")
    source = shared_data("models", "classics-1M")
    data = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))

    def store(kind: str):
        def stored(name: str, value: np.ndarray) -> tuple[np.ndarray, str]:
            return gguf.quants.quantize(value.astype(np.float32), gguf_files.KINDS[kind]), kind

        return stored

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        gguf_files.byte_level(writer, data, "gpt-2")

    gguf_files.write(source, root / "classics-Q8_0.gguf", store("Q8_0"), vocabulary=vocabulary)
    gguf_files.write(source, root / "classics-Q4_0.gguf", store("Q4_0"), vocabulary=vocabulary, split=9)
    (root / "mmproj-classics-f16.gguf").write_bytes(b"GGUF of pictures")
    (root / "README.md").write_text("# Classics")
    assert not (root / "classics-Q4_0.gguf").exists()
    return root


def test_a_checkpoint_comes_from_the_hub_though_it_is_cut(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    shutil.copytree(shared_data("models", "stories260K"), folder)
    (folder / "pytorch_model.bin").write_bytes(b"nothing that a build reads")
    weights = (folder / "model.safetensors").stat().st_size
    with hub({"someone/stories": folder}) as at:
        at.cut["model.safetensors"] = weights // 2
        made = build(at, "someone/stories", tmp_path)
        assert made.returncode == 0, made.stderr
        asked = [line for line in at.asked if "/model.safetensors" in line and line.startswith("GET")]
        assert len(asked) == 2, asked
        assert not any("pytorch_model.bin" in line for line in at.asked)
        again = len(at.asked)
        assert build(at, "someone/stories", tmp_path, HF_HUB_OFFLINE="1").returncode == 0
        assert len(at.asked) == again  # the model came from the cache
        missing = build(at, "someone/nothing", tmp_path)
        assert missing.returncode == 1
        place = at.url.removeprefix("http://")
        assert (
            f"{place} has no model someone/nothing, or it may not be read: check the name" in missing.stderr
        )
        dark = build(at, "someone/other", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
        assert "127.0.0.1:9 cannot be reached from here (the connection is refused)" in dark.stderr
        assert "thrown while" not in dark.stderr  # the client's own words do not appear
    manifest = json.loads((tmp_path / "out" / "mlx" / "manifest.json").read_text())
    assert manifest["model"]["name"] == "someone/stories"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint with weights of some megabytes."""
    folder = tmp_path / "large"
    shutil.copytree(Path(__file__).resolve().parents[2] / "examples" / "sample-model", folder)
    return folder


def test_ctrl_c_ends_a_download_at_once_and_the_next_goes_on(tmp_path: Path, large: Path) -> None:
    """The download ends although the hub is silent; received bytes are not downloaded again."""
    with hub({"someone/large": large}) as at:
        at.hold["model.safetensors"] = 3_000_000
        client = {"HF_ENDPOINT": at.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        client["HF_HUB_DOWNLOAD_TIMEOUT"] = "120"  # seconds that the client itself waits for a silent hub
        command = [sys.executable, "-m", "nearfar", "build", "someone/large", "--target", "mlx"]
        running = subprocess.Popen(
            [*command, "-o", str(tmp_path / "out")],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **client},
        )
        assert at.held.wait(60)
        until = time.monotonic() + 30
        while not (found := [*tmp_path.rglob("*.incomplete")]) or found[0].stat().st_size < 3_000_000:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert running.stderr is not None
        told = ""
        while "3 of 10 MB; all:" not in told:
            told += (line := running.stderr.readline())
            assert line, told  # an empty line means that the process has ended
        running.send_signal(signal.SIGINT)
        told += running.communicate(timeout=30)[1]
        assert running.returncode == 130
        assert "Traceback" not in told
        assert "downloading model.safetensors, 3 of 10 MB; all: 3 of 10 MB, " in told
        assert "it/s" not in told
        made = build(at, "someone/large", tmp_path)
        assert made.returncode == 0, made.stderr
        asked_for = [line for line in at.asked if "/model.safetensors" in line and line.startswith("GET")]
        assert len(asked_for) == 2
        assert asked_for[1].endswith(" bytes=3000000-")
        assert "Fetching" not in made.stderr
    assert not [*tmp_path.rglob("*.incomplete")]


def test_a_beginning_of_something_else_is_fetched_anew(tmp_path: Path, large: Path) -> None:
    content = (large / "model.safetensors").read_bytes()
    blobs = tmp_path / "hub" / "hub" / "models--someone--large" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(content).hexdigest()}.incomplete").write_bytes(b"x" * 1000)
    with hub({"someone/large": large}) as at:
        made = build(at, "someone/large", tmp_path)
        assert made.returncode == 0, made.stderr
    assert (blobs / hashlib.sha256(content).hexdigest()).read_bytes() == content


def test_a_repository_of_gguf_files_is_asked_for_one(tmp_path: Path, quantized: Path) -> None:
    with hub({"someone/classics-GGUF": quantized}) as at:
        made = build(at, "someone/classics-GGUF:q8_0", tmp_path)
        assert made.returncode == 0, made.stderr
        assert "exact: 17 matrices" in made.stderr
        fetched = {line.split("/")[-1] for line in at.asked if line.startswith("GET") and "resolve" in line}
        assert fetched == {"classics-Q8_0.gguf"}
        # the file has several parts; the second build has no network
        for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
            made = build(at, "someone/classics-GGUF:Q4_0", tmp_path, **environment)
            assert made.returncode == 0, made.stderr
        manifest = json.loads((tmp_path / "out" / "mlx" / "manifest.json").read_text())
        assert (manifest["model"]["name"], manifest["quantization"]["scheme"]) == ("classics-Q4_0", "q4")
        refused = build(at, "someone/classics-GGUF:Q3_K", tmp_path)
        assert refused.returncode == 1
        assert "is none of the GGUF models classics-Q4_0, classics-Q8_0" in " ".join(refused.stderr.split())


MODELS = {name: [f"{name}.gguf"] for name in ("m-Q4_K_M", "m-Q4_K_S", "m-Q8_0", "sub/m-Q6_K")}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(None, "m-Q4_K_M"), ("q4_k_s", "m-Q4_K_S"), ("m-Q8_0.gguf", "m-Q8_0"), ("Q6_K", "sub/m-Q6_K"),
     ("sub/m-q6_k", "sub/m-Q6_K")],
)  # fmt: skip
def test_the_model_that_is_wanted(wanted: str | None, found: str) -> None:
    assert choose("a/b", MODELS, wanted) == MODELS[found]


def test_what_could_be_several_or_none_is_refused_with_their_names() -> None:
    with pytest.raises(CheckpointError, match=r"a/b:Q2_K is none of .* m-Q4_K_M, m-Q4_K_S, m-Q6_K, m-Q8_0"):
        choose("a/b", MODELS, "Q2_K")
    two = {name: [name] for name in ("one-Q8_0", "two-Q8_0")}
    with pytest.raises(CheckpointError, match=r"a/b:Q8_0 could be several of .*: say more of its name"):
        choose("a/b", two, "Q8_0")
    with pytest.raises(CheckpointError, match=r"a/b has the GGUF models .*: say which one, as a/b:Q4_K_M"):
        choose("a/b", {name: [name] for name in ("one-f16", "two-f16")}, None)
