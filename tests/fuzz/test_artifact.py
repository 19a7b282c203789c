"""Manifests, plans and files of an artifact are read as they are or rejected with a message; nothing else
happens.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from nearfar.edge_runtime.artifact.budget import page_bytes, useful_pages
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import ArtifactError
from nearfar.format.manifest_file import parse, read
from nearfar.format.plans import parse_plan
from tests.fuzz.effort import effort
from tests.fuzz.mutate import mutants
from tests.support import tiny

PLANNED = tiny.manifest_dict()
PLANNED["programs"][0] |= {
    "workspace": [64],
    "kernels": {"k": {"params": [{"dtype": "float32", "shape": [4]}] * 2}},
}
LAUNCH = {"kernel": "k", "args": ["weight:rope.inv_freq", "buffer:logits"]}
PLAN = {
    "function": "step",
    "size": 4,
    "rows": 4,
    "launches": [LAUNCH, {**LAUNCH, "args": ["workspace:0", "buffer:logits"]}],
}


@effort(150)
@given(st.one_of(mutants(PLANNED), mutants(tiny.manifest_dict(target="mlx"))))
def test_a_manifest_is_refused_or_adds_up(data: dict[str, Any]) -> None:
    try:
        manifest = parse(data, "manifest.json")
    except ArtifactError:
        return
    assert sum(shard.bytes for shard in manifest.weights.shards) == manifest.weights.bytes
    assert all(tensor.offset + tensor.bytes <= manifest.weights.bytes for tensor in manifest.weights.tensors)
    assert all(token < manifest.model.vocab_size for token in manifest.model.eos_token_ids)
    assert all(0 < pages <= 4096 * 2**24 for pages in useful_pages(manifest))
    for program in manifest.programs:
        assert min(page_bytes(manifest, program)) > 0
        assert all(program.functions[name] for name in ("step", "greedy", "sample", "logprobs"))
        assert [bucket.plan for bucket in program.functions["step"]]
        assert {cache.group for cache in manifest.caches} == set(range(len(manifest.groups)))


@effort(150)
@given(
    st.one_of(
        st.text(), st.binary().map(lambda data: data.decode("latin-1")), mutants(PLANNED).map(json.dumps)
    )
)
def test_no_text_is_a_manifest_but_a_sealed_one(text: str) -> None:
    try:
        read(text, "manifest.json")
    except ArtifactError:
        return
    raise AssertionError("accepted")


@effort(150)
@given(mutants(PLAN))
def test_a_plan_is_refused_or_launches_what_there_is(data: dict[str, Any]) -> None:
    manifest = parse(PLANNED, "manifest.json")
    program = manifest.programs[0]
    try:
        plan = parse_plan(json.dumps(data), "step", program.functions["step"][1], program, manifest)
    except ArtifactError:
        return
    assert (plan.function, plan.size, plan.rows) == ("step", 4, 4)
    for launch in plan.launches:
        assert len(launch.args) == len(program.kernels[launch.kernel].params)
        assert set(launch.args) <= {
            "weight:rope.inv_freq",
            "workspace:0",
            *(f"buffer:{b.name}" for b in manifest.buffers),
        }


@functools.cache
def whole() -> tuple[Path, list[str]]:
    """An artifact that passes verification, and its files."""
    root = tiny.write_artifact(Path(tempfile.mkdtemp()) / "tiny")
    return root, sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@effort(60)
@given(st.data())
def test_every_changed_byte_is_seen(data: st.DataObject) -> None:
    source, files = whole()
    name = data.draw(st.sampled_from(files))
    before = (source / name).read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    piece = data.draw(st.binary(max_size=3))
    after = before[:at] + piece + before[at + data.draw(st.integers(0, 3)) :]
    assume(after != before)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(source, Path(folder) / "copy"))
        (copy / name).write_bytes(after)
        try:
            Artifact.open(copy).verify()
        except ArtifactError:
            return
    raise AssertionError(f"a change of {name} was not seen")


def test_the_artifact_itself_is_good() -> None:
    artifact = Artifact.open(whole()[0])
    artifact.verify()
    TextCodec.open(artifact)
