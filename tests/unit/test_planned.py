"""Shared parts of executors of plans: shapes by group, which buffers may be written, pieces of weights,
rotations.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.executors.planned import ProgramLayout, pieces, place, seconds
from nearfar.errors import ArtifactError
from nearfar.format.manifest import Program
from nearfar.format.rotations import rope_table
from tests.support import tiny

HYBRID = {
    **tiny.CONFIG, "model_type": "mistral", "num_hidden_layers": 3, "sliding_window": 32,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return Artifact.open(tiny.write_artifact(tmp_path / "tiny"))


def layout(artifact: Artifact, *pages: int, context: int = 48, **changes: str) -> ProgramLayout:
    program: Program = dataclasses.replace(artifact.manifest.programs[0], **changes)  # type: ignore[arg-type]
    return ProgramLayout(artifact, program, Settings(pages, context))


def test_each_group_has_its_pages_and_its_caches(tmp_path: Path) -> None:
    path = tiny.write_artifact(tmp_path / "tiny")
    made = tiny.manifest_dict(HYBRID)
    tiny.edit_manifest(
        path, lambda data: data.update({key: made[key] for key in ("groups", "caches", "buffers", "step")})
    )
    found = layout(Artifact.open(path), 5, 3, kv_dtype="float16")
    windows = [group.window for group in Artifact.open(path).manifest.groups]
    full, sliding = windows.index(None), windows.index(32)
    assert list(found.caches(full)) == ["kv.0.k", "kv.0.v", "kv.2.k", "kv.2.v"]
    assert list(found.caches(sliding)) == ["kv.1.k", "kv.1.v"]
    pages = {full: (5, 3)[full], sliding: (5, 3)[sliding]}
    for group in (full, sliding):
        for cache in found.caches(group).values():
            assert cache.extents == (pages[group], 2, 16, 8)
            assert (cache.dtype, cache.row_bytes, cache.nbytes) == (np.float16, 512, 512 * pages[group])
            assert cache.rows(4) == (4, 2, 16, 8)
    assert found.buffer("rope.rope").extents == (48, 8)
    with pytest.raises(ArtifactError, match="no buffer 'nothing'"):
        found.buffer("nothing")


def test_pages_of_another_group_or_number_are_refused_by_name(artifact: Artifact) -> None:
    found = layout(artifact, 4)
    content = {name: np.zeros(shape.rows(2), shape.dtype) for name, shape in found.caches(0).items()}
    assert list(found.check_pages(0, [3, 1], content)) == list(content)
    for wrong in (
        {**content, "kv.1.v": np.zeros((2, 2, 16, 8), np.float16)},
        {name: array for name, array in content.items() if name != "kv.1.v"},
        {**content, "kv.1.v": np.zeros((1, 2, 16, 8), np.float32)},
    ):
        with pytest.raises(ValueError, match=r"pages do not fit the cache: kv\.1\.v"):
            found.check_pages(0, [3, 1], wrong)


def test_where_rows_and_parts_of_a_row_are_written(artifact: Artifact) -> None:
    found = layout(artifact, 4)
    row = found.buffer("page_table.0").extents[1]
    assert found.place("positions", np.zeros(3, np.int32), 5, 0) == 20
    assert found.place("page_table.0", np.zeros((2, row), np.int32), 3, 0) == 12 * row
    assert found.place("page_table.0", np.zeros((1, 2), np.int32), 3, 4) == 12 * row + 16
    for data, at, column in (
        (np.zeros(3, np.int64), 0, 0), (np.zeros(3, np.int32), 254, 0), (np.zeros(3, np.int32), -1, 0),
        (np.zeros(3, np.int32), 0, 1), (np.zeros((1, 3), np.int32), 0, 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"does not fit positions, int32\[256\]"):
            found.place("positions", data, at, column)
    for shape, column in (((2, 2), 0), ((1, 2), row - 1), ((1, 2), -1), ((1, row), 1)):
        with pytest.raises(ValueError, match="does not fit page_table"):
            place("page_table.0", (8, row), np.dtype(np.int32), np.zeros(shape, np.int32), 0, column)


@pytest.mark.parametrize("most", [1, 100, 1000, 3200, 10**6])
def test_a_tensor_comes_in_pieces_across_shards(artifact: Artifact, most: int) -> None:
    tensor = artifact.tensors["b"]
    data = bytearray(tensor.bytes)
    for start, piece in pieces(artifact, tensor, most):
        assert len(piece) <= most
        data[start : start + len(piece)] = piece.tobytes()
    np.testing.assert_array_equal(np.frombuffer(data, np.uint32), artifact.read_tensor("b"))


def test_a_plan_is_looked_up_by_function_and_size(artifact: Artifact) -> None:
    found = layout(artifact, 4)
    assert found.launches("step", 4) == ()
    for function, size in (("step", 5), ("dance", 1)):
        with pytest.raises(ArtifactError, match=f"no plan for {function} of size {size}"):
            found.launches(function, size)


def test_what_is_not_turned_is_not_scaled() -> None:
    table = rope_table(np.array([1.0, 0.5, 0.0], np.float32), 2.0, 3)
    angle = np.arange(3)[:, None] * [1.0, 0.5]
    np.testing.assert_allclose(table[:, :2], 2 * np.cos(angle), rtol=1e-6)
    np.testing.assert_allclose(table[:, 3:5], 2 * np.sin(angle), atol=1e-6)
    assert (table[:, 2] == 1).all()
    assert (table[:, 5] == 0).all()


def test_seconds_between_stamps_of_a_counter_that_starts_again() -> None:
    """The counter wraps at 2³² here; a stamp that went back counts as no time."""
    before, after = np.array([10, 2**32 - 5, 7], np.uint64), np.array([30, 5, 6], np.uint64)
    assert seconds(before, after, 1e-8, 32) == pytest.approx((2e-7, 1e-7, 0))
    assert seconds(before[[0, 2]], after[[0, 2]], 1e-9) == pytest.approx((2e-8, 0))
