"""Bundle files: several small files in one, and the errors of readers for damaged ones."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import ArtifactError
from nearfar.format.bundle_files import bundle, files_of, unbundled
from tests.support import tiny


@given(st.dictionaries(st.text(), st.binary(max_size=50), max_size=5))
def test_bundled_files_come_out_and_equal_files_give_equal_bytes(files: dict[str, bytes]) -> None:
    assert unbundled(bundle(files), "it") == files
    assert bundle(files) == bundle(dict(files))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no index",
        b'[["a", 3]]\nab',
        b'[["a", 1]]\nab',
        b'[["a", 3], ["b", -1]]\nab',
        b'{"a": 2}\nab',
        b'[["a"]]\nab',
        b'[["a", "x"]]\nab',
        b"\xff\n",
    ],
)
def test_a_damaged_bundle_file_is_rejected_by_name(content: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"packs/it.bin is not a bundle file"):
        unbundled(zlib.compress(content), "packs/it.bin")


def test_a_file_that_is_not_compressed_is_rejected() -> None:
    with pytest.raises(ArtifactError, match="it is not a bundle file"):
        unbundled(b'[["a", 1]]\na', "it")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An artifact with a bundle file of its program."""
    root = tiny.write_artifact(tmp_path / "tiny")
    program = Artifact.open(root).manifest.programs[0]
    put(root, {file: (root / file).read_bytes() for file in files_of(program)})
    return root


def put(root: Path, files: dict[str, bytes]) -> None:
    """Write a bundle file with these files, and list it in the manifest."""
    content = bundle(files)
    (root / "packs").mkdir(exist_ok=True)
    (root / "packs" / "f32.bin").write_bytes(content)
    entry: dict[str, Any] = {"file": "packs/f32.bin", "bytes": len(content), "program": "f32"}
    entry["sha256"] = hashlib.sha256(content).hexdigest()
    tiny.edit_manifest(root, lambda data: data.update(packs=[entry]))


def test_bundle_files_are_verified_with_the_rest(path: Path) -> None:
    Artifact.open(path).verify()
    (path / "packs" / "f32.bin").write_bytes(b"other")
    with pytest.raises(ArtifactError, match=r"packs/f32.bin is truncated"):
        Artifact.open(path).verify()


def test_a_bundle_file_with_other_contents_is_rejected(path: Path) -> None:
    put(path, {"plans/f32/step.1.json": b"{}"})
    with pytest.raises(ArtifactError, match=r"packs/f32.bin of .* holds another plans/f32/step.1.json"):
        Artifact.open(path).verify()


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        (["f16"], "names program 'f16', which the manifest does not have"),
        (["f32", "f32"], "names a program twice"),
    ],
)
def test_bundle_files_of_an_unknown_program_or_of_one_twice_are_rejected(
    path: Path, programs: list[str], said: str
) -> None:
    def change(data: dict[str, Any]) -> None:
        data["packs"] = [{**data["packs"][0], "program": name} for name in programs]

    tiny.edit_manifest(path, change)
    with pytest.raises(ArtifactError, match=said):
        Artifact.open(path)
