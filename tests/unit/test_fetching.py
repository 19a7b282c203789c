"""Artifacts at a URL: their manifests list the files, downloads resume within a file, and files are
checked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nearfar import downloads
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import ArtifactError, StoreError
from nearfar.format.manifest import LISTING
from nearfar.store.entries import Store
from nearfar.store.fetching import ASIDE, address_of, fetch, name_of
from nearfar.store.naming import GivenOptions, wanted_of
from tests.support import tiny
from tests.support.hub import Hub, hub


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PAUSE", 0.01)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The output of a build: a folder with one artifact."""
    out = tmp_path / "out"
    tiny.write_artifact(out / "first")
    target = Artifact.open(out / "first").target
    (out / "first").rename(out / target)
    return out


@pytest.fixture
def host(made: Path) -> Iterator[Hub]:
    with hub({"some/model": made}) as running:
        yield running


def target_of(made: Path) -> str:
    (folder,) = made.iterdir()
    return folder.name


def address(host: Hub, *below: str) -> str:
    return address_of("/".join((host.url, "some/model/resolve/main", *below)))


def told(done: int, total: int) -> None:
    assert 0 <= done <= total


def shard_of(folder: Path) -> str:
    return Artifact.open(folder).manifest.weights.shards[0].file


def test_all_files_come_and_are_checked(host: Hub, made: Path, tmp_path: Path) -> None:
    target = target_of(made)
    # the address of the artifact itself, and of the folder above it
    for given in (address(host, target), address(host)):
        place = fetch(given, tmp_path / "in", (target,), told)
        assert place == tmp_path / "in" / target
        Artifact.open(place).verify()
        assert not (tmp_path / "in" / ASIDE).exists()


def test_a_folder_whose_server_lists_it_is_looked_into(host: Hub, made: Path, tmp_path: Path) -> None:
    """The server answers as `nearfar web` does for a folder of several artifacts."""
    target = target_of(made)
    (made / "manifest.json").write_text(json.dumps({"format": LISTING, "targets": [target]}))
    Artifact.open(fetch(address(host), tmp_path / "in", ("webgpu", target), told)).verify()
    with pytest.raises(StoreError, match=r"neither there nor in onnx below"):
        fetch(address(host), tmp_path / "in", ("onnx",), told)


def test_a_page_is_no_manifest_and_leaves_nothing(host: Hub, made: Path, tmp_path: Path) -> None:
    (made / "manifest.json").write_text("<!doctype html><title>Shop</title>")
    with pytest.raises(StoreError, match=r"/main/manifest.json gives a web page \(.*check the address"):
        fetch(address(host), tmp_path / "in", ("onnx",), told)
    (made / "manifest.json").write_text('{"a": ')
    with pytest.raises(ArtifactError, match=rf"^{address(host)}manifest.json"):
        fetch(address(host), tmp_path / "in", ("onnx",), told)
    assert not [file for file in tmp_path.rglob("in/**/*") if file.is_file()]
    assert not (tmp_path / "in" / ASIDE).exists()


def test_a_cut_file_goes_on_in_its_middle(host: Hub, made: Path, tmp_path: Path) -> None:
    target = target_of(made)
    shard = shard_of(made / target)
    host.cut[f"{target}/{shard}"] = 100
    Artifact.open(fetch(address(host, target), tmp_path / "in", (target,), told)).verify()
    asked = [line for line in host.asked if line.split()[1].endswith(shard)]
    assert len(asked) == 2
    assert asked[1].endswith("bytes=100-")


def test_what_another_download_left_is_taken_and_what_is_of_another_file_is_not(
    host: Hub, made: Path, tmp_path: Path
) -> None:
    target = target_of(made)
    shard = shard_of(made / target)
    content = (made / target / shard).read_bytes()
    for begun in (content[:64], b"x" * 64, content + b"more"):
        aside = tmp_path / "in" / ASIDE / "artifact"
        (aside / shard).parent.mkdir(parents=True)
        (aside / shard).with_name(f".{Path(shard).name}.part").write_bytes(begun)
        Artifact.open(fetch(address(host, target), tmp_path / "in", (target,), told)).verify()
        shutil.rmtree(tmp_path / "in")


def test_a_file_that_is_not_what_the_manifest_says_is_refused(host: Hub, made: Path, tmp_path: Path) -> None:
    target = target_of(made)
    file = made / target / shard_of(made / target)
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    with pytest.raises(
        ArtifactError, match=rf"{file.name} is corrupt: SHA-256 .*does not match its manifest"
    ):
        fetch(address(host, target), tmp_path / "in", (target,), told)
    file.write_bytes(content + b"more")
    with pytest.raises(StoreError, match=rf"has more than the {len(content):,} bytes"):
        fetch(address(host, target), tmp_path / "in", (target,), told)
    file.unlink()
    with pytest.raises(StoreError, match=rf"{file.name}: the host answers 404"):
        fetch(address(host, target), tmp_path / "in", (target,), told)
    assert not (tmp_path / "in" / target).exists()


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", ".evil", "a\\evil", "c:evil"])
def test_names_that_lead_out_are_refused(host: Hub, made: Path, tmp_path: Path, name: str) -> None:
    target = target_of(made)

    def change(data: dict[str, Any]) -> None:
        data["weights"]["shards"][0]["file"] = name

    tiny.edit_manifest(made / target, change)
    with pytest.raises(ArtifactError, match="does not follow the artifact format"):
        fetch(address(host, target), tmp_path / "in", (target,), told)
    assert len(host.asked) == 1


def test_what_is_too_large_for_the_disk_is_refused_before_it_is_fetched(
    host: Hub, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(made)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(StoreError, match=r"needs .* at least, .*/in has 10 bytes free: .*NEARFAR_HOME"):
        fetch(address(host, target), tmp_path / "in", (target,), told)
    assert len(host.asked) == 1


def test_what_is_none_for_this_machine_says_so(host: Hub, made: Path, tmp_path: Path) -> None:
    target = target_of(made)
    with pytest.raises(StoreError, match=f"is for {target}, not for nothing"):
        fetch(address(host, target), tmp_path / "in", ("nothing",), told)
    with pytest.raises(StoreError, match=r"has no manifest.json, neither there nor in nothing below"):
        fetch(address(host), tmp_path / "in", ("nothing",), told)
    with pytest.raises(StoreError, match="cannot be fetched"):
        fetch("http://127.0.0.1:9/", tmp_path / "in", (target,), told)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("https://", "is not an address"),
        ("https://a b/", "is not an address"),
        ("https://host:port/", "is not an address"),
        ("https://me:secret@host/", "contains a name or a password"),
        ("https://host/x?token=1", "a \\?query"),
        ("https://host/x#y", "a \\?query or a #fragment"),
    ],
)
def test_addresses_that_cannot_be_asked(given: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as error:
        address_of(given)
    assert "secret" not in str(error.value)


def test_addresses_and_names() -> None:
    assert (
        address_of("HTTPS://host/a/b") == address_of("https://host/a/b/manifest.json") == "https://host/a/b/"
    )
    assert name_of("https://host/models/tales/webgpu/", ("cpu", "webgpu")) == "tales"
    assert name_of("http://host:80/artifact/", ("cpu",)) == "host"
    store = Store(Path("nowhere"))
    assert wanted_of("https://host/models/tales", store).source == "https://host/models/tales/"
    with pytest.raises(StoreError, match="leave --quant out"):
        wanted_of("https://host/models/tales", store, GivenOptions("q4"))
