"""Opening, checking and reading artifacts; every kind of damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.edge_runtime.artifact import Artifact
from nearfar.edge_runtime.loading import choose
from nearfar.edge_runtime.manifest import parse
from nearfar.edge_runtime.memory import parse_size, plan_pages, useful_pages
from nearfar.errors import ArtifactError, DeviceError, RequestError
from tests.support import tiny


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny.write_artifact(tmp_path / "tiny")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / "manifest.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_a_good_artifact(path: Path) -> None:
    artifact = Artifact.open(path)
    artifact.verify()
    manifest = artifact.manifest
    assert manifest.model.eos_token_ids == (257,)
    assert manifest.programs[0].functions["step"][1].size == 4
    assert manifest.rope.scale == 1.0
    np.testing.assert_array_equal(artifact.read_tensor("a"), np.arange(100).reshape(10, 10))
    np.testing.assert_array_equal(artifact.read_tensor("b"), np.arange(128, 928))  # spans shards
    assert artifact.plan(manifest.programs[0].functions["step"][0]).launches == ()
    with pytest.raises(ArtifactError, match="no tensor nothing"):
        artifact.read_tensor("nothing")


def test_a_newer_format_says_upgrade(path: Path) -> None:
    edit(path, lambda data: data.update(version=2))
    with pytest.raises(ArtifactError, match=r"artifact format 2 is newer than this nearfar understands \(1\). Upgrade"):
        Artifact.open(path)


def test_no_artifact(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="it has no manifest"):
        Artifact.open(tmp_path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="not valid JSON"):
        Artifact.open(path)
    (path / "manifest.json").write_text("[]")
    with pytest.raises(ArtifactError, match="not the manifest of a nearfar artifact"):
        Artifact.open(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["model"].pop("layers"), r"\$.model: 'layers' is a required property"),
        (lambda d: d["model"].update(heads=0), r"\$.model.heads: 0 is less than"),
        (lambda d: d["weights"]["shards"][0].update(file="../../etc/passwd"), "does not match"),
        (lambda d: d["weights"]["shards"][0].update(file="/etc/passwd"), "does not match"),
        (lambda d: d["weights"]["tensors"][0].update(offset=4), "not a multiple of 256"),
        (lambda d: d.update(target="toaster"), "'toaster' is not one of"),
        (lambda d: d.update(programs=[]), "programs"),
        (lambda d: d["programs"][0]["functions"].pop("greedy"), "'greedy' is a required property"),
    ],
)
def test_a_wrong_manifest_says_where(path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(path, change)
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(path)


def test_all_damage_is_named_at_once(path: Path) -> None:
    Artifact.open(path).verify()
    shard = path / "weights" / "00001.bin"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    (path / "weights" / "00002.bin").unlink()
    (path / "weights" / "00003.bin").write_bytes(b"short")
    (path / "tokenizer" / "tokenizer.json").write_text("{}" + " " * 10**6)
    (path / "plans" / "f32" / "step.1.json").unlink()
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(path).verify()
    message = str(caught.value)
    assert "weights/00000.bin" not in message
    assert "weights/00001.bin is corrupt: SHA-256 " in message
    assert ", expected " in message
    assert "weights/00002.bin is missing" in message
    assert "weights/00003.bin is truncated: 5 of 928 bytes" in message
    assert "tokenizer/tokenizer.json is too long" in message
    assert "plans/f32/step.1.json is missing" in message
    with pytest.raises(ArtifactError, match="missing"):
        Artifact.open(path).read_tensor("b")


def test_the_library_is_checked(path: Path) -> None:
    (path / "model.so").write_bytes(b"code")
    edit(path, lambda d: d["programs"][0].update(library="model.so", library_sha256="0" * 64))
    with pytest.raises(ArtifactError, match="so is corrupt"):
        Artifact.open(path).verify()


def test_programs_are_chosen_by_what_the_device_has(path: Path) -> None:
    def two(data: dict[str, Any]) -> None:
        better = json.loads(json.dumps(data["programs"][0]))
        better |= {"precision": "f16", "requires": {"features": ["shader-f16"], "limits": {"maxBufferSize": 100}}}
        data["programs"].insert(0, better)

    edit(path, two)
    artifact = Artifact.open(path)
    assert artifact.choose_program({"shader-f16"}, {"maxBufferSize": 100}).precision == "f16"
    assert artifact.choose_program({"shader-f16"}, {"maxBufferSize": 99}).precision == "f32"
    assert artifact.choose_program([]).precision == "f32"
    edit(path, lambda data: data["programs"].pop())
    with pytest.raises(DeviceError, match=r"f16 needs feature shader-f16, maxBufferSize 100 \(has 10\)"):
        Artifact.open(path).choose_program([], {"maxBufferSize": 10})


def test_choosing_an_artifact(path: Path) -> None:
    assert choose(path, "auto")[0].target == "cpu"
    assert choose(path.parent, "cpu")[0].target == "cpu"
    with pytest.raises(RequestError, match="device must be auto, cpu"):
        choose(path, "quantum")
    with pytest.raises(ArtifactError, match="holds no artifact"):
        choose(path / "weights", "auto")
    with pytest.raises(ArtifactError, match="does not exist"):
        choose(path / "nowhere", "auto")


def test_memory_sizes() -> None:
    assert parse_size("512MB") == 512 * 10**6
    assert parse_size("1.5 GiB") == 3 * 2**29
    assert parse_size("1000") == 1000
    assert parse_size(7) == 7
    for bad in ("", "MB", "-1", "1 XB", "0MB", 0, "9" * 400):
        with pytest.raises(RequestError, match="kv_memory"):
            parse_size(bad)


def test_pages_of_a_budget() -> None:
    manifest = parse(tiny.manifest_dict(), "manifest.json")
    program = manifest.programs[0]
    page = manifest.memory.kv_bytes_per_token["f32"] * 16
    assert plan_pages(manifest, program, 5 * page + 1) == 5
    assert plan_pages(manifest, program, 10**9) == useful_pages(manifest) == 80
    assert plan_pages(manifest, program, None) == 80
    assert plan_pages(manifest, program, None, max_pages=9) == 9
    with pytest.raises(
        DeviceError, match=r"one page of 16 tokens takes 4.1 kB, the full context of 160 tokens 41.0 kB"
    ):
        plan_pages(manifest, program, 100)
    with pytest.raises(DeviceError, match="more than this machine has"):
        plan_pages(manifest, program, "900TB")
    with pytest.raises(DeviceError, match="more than this machine has"):
        plan_pages(manifest, program, 10**400)
