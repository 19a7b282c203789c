"""CPU artifacts whose manifest or plans are inconsistent are rejected by name."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime import Engine
from nearfar.errors import ArtifactError, DeviceError, NearfarError
from nearfar.format.buffers import buffers
from nearfar.format.manifest import Cache
from nearfar.format.manifest_file import parse
from tests.support import tiny
from tests.support.backends import Lab

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def artifact(lab: Lab, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lab.artifact("stories", "cpu"), tmp_path / "cpu"))


def load(artifact: Path) -> None:
    with Engine.load(artifact, verify=False, kv_memory="8MB", threads=1):
        pass


def buffer(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found for found in manifest["buffers"] if found["name"] == name)


def tensor(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found for found in manifest["weights"]["tensors"] if found["name"] == name)


MANIFESTS: dict[str, Change] = {
    "a tensor past the end": lambda m: tensor(m, "rope.rope.inv_freq").update(offset=m["weights"]["bytes"]),
    "a tensor of another dtype": lambda m: tensor(m, "rope.rope.inv_freq").update(dtype="complex3"),
    "a tensor of another shape": lambda m: tensor(m, "rope.rope.inv_freq").update(shape=[3, 5, 7]),
    "no frequencies": lambda m: m["ropes"]["rope"].update(inv_freq="nowhere"),
    "frequencies as numbers": lambda m: m["ropes"]["rope"].update(inv_freq=[1.0, 2.0]),
    "no library": lambda m: m["programs"][0].update(library=None),
    "a library that is not there": lambda m: m["programs"][0].update(library="kernels/f32/other.so"),
    "a library that is none": lambda m: m["programs"][0].update(library="manifest.json"),
    "a shard that is not there": lambda m: m["weights"]["shards"][0].update(file="weights/9.bin"),
    "no kernels": lambda m: m["programs"][0].update(kernels={}),
    "a kernel without parameters": lambda m: next(iter(m["programs"][0]["kernels"].values())).update(
        params=[]
    ),
    "no buffers": lambda m: m.update(buffers=[]),
    "a buffer without a size": lambda m: buffer(m, "logits").update(shape=["nothing"]),
    "no caches": lambda m: m.update(caches=[], groups=[]),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_does_not_fit_is_refused_by_name(artifact: Path, name: str) -> None:
    tiny.edit_manifest(artifact, MANIFESTS[name])
    with pytest.raises(NearfarError):
        load(artifact)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"launches": [{}]}', '{"launches": 3}', "[" * 100_000, "\x80"]
)
def test_a_plan_that_cannot_be_read_is_named(artifact: Path, content: str) -> None:
    next(artifact.glob("plans/*/greedy.1.json")).write_text(content, encoding="latin-1")
    with pytest.raises(ArtifactError, match=r"greedy\.1\.json"):
        load(artifact)


def test_buffers_that_no_memory_holds_are_refused_with_the_context(artifact: Path) -> None:
    def far(manifest: dict[str, Any]) -> None:
        records = parse(manifest, "manifest.json")
        cache = Cache(page_size=1, slots=4096)
        ropes = {name: records.caches[0].head_dim for name in records.ropes}
        made = buffers(records.model.vocab_size, 1 << 24, cache, records.groups, records.caches, ropes)
        manifest["model"]["context_length"] = 1 << 24
        manifest["cache"] = dataclasses.asdict(cache)
        manifest["buffers"] = [{**dataclasses.asdict(each), "shape": list(each.shape)} for each in made]

    tiny.edit_manifest(artifact, far)
    with pytest.raises(
        DeviceError, match=r"buffer page_table.0 .* context of 16,777,216 tokens.*max_position_embeddings"
    ):
        load(artifact)
