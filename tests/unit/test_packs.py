"""Packs: small files in one, and what a reader says of packs that are not what they should be."""

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
from nearfar.format.packs import files_of, packed, unpacked
from tests.support import tiny


@given(st.dictionaries(st.text(), st.binary(max_size=50), max_size=5))
def test_what_is_packed_comes_out_and_the_same_gives_the_same(files: dict[str, bytes]) -> None:
    assert unpacked(packed(files), "it") == files
    assert packed(files) == packed(dict(files))


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
def test_what_is_no_pack_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"packs/it.bin is no pack"):
        unpacked(zlib.compress(content), "packs/it.bin")


def test_what_is_not_compressed_is_no_pack() -> None:
    with pytest.raises(ArtifactError, match="it is no pack"):
        unpacked(b'[["a", 1]]\na', "it")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An artifact with a pack of its program."""
    root = tiny.write_artifact(tmp_path / "tiny")
    program = Artifact.open(root).manifest.programs[0]
    put(root, {file: (root / file).read_bytes() for file in files_of(program)})
    return root


def put(root: Path, files: dict[str, bytes]) -> None:
    """Write a pack of these files, and list it."""
    pack = packed(files)
    (root / "packs").mkdir(exist_ok=True)
    (root / "packs" / "f32.bin").write_bytes(pack)
    entry: dict[str, Any] = {"file": "packs/f32.bin", "bytes": len(pack), "program": "f32"}
    entry["sha256"] = hashlib.sha256(pack).hexdigest()
    tiny.edit_manifest(root, lambda data: data.update(packs=[entry]))


def test_packs_are_verified_with_the_rest(path: Path) -> None:
    Artifact.open(path).verify()
    (path / "packs" / "f32.bin").write_bytes(b"other")
    with pytest.raises(ArtifactError, match=r"packs/f32.bin is truncated"):
        Artifact.open(path).verify()


def test_a_pack_of_other_files_is_refused(path: Path) -> None:
    put(path, {"plans/f32/step.1.json": b"{}"})
    with pytest.raises(ArtifactError, match=r"packs/f32.bin of .* holds another plans/f32/step.1.json"):
        Artifact.open(path).verify()


@pytest.mark.parametrize(
    ("programs", "said"),
    [(["f16"], "one of 'f16', which is no program"), (["f32", "f32"], "two of the same")],
)
def test_packs_of_no_program_or_of_one_twice_do_not_add_up(
    path: Path, programs: list[str], said: str
) -> None:
    def change(data: dict[str, Any]) -> None:
        data["packs"] = [{**data["packs"][0], "program": name} for name in programs]

    tiny.edit_manifest(path, change)
    with pytest.raises(ArtifactError, match=said):
        Artifact.open(path)
