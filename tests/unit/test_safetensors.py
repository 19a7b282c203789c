"""The safetensors stream: read back by the safetensors library, cut into files, wrong order refused."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from nearfar.build.weights.headers import read_header
from nearfar.build.weights.safetensors import SafetensorsWriter, TensorSpec
from nearfar.errors import BuildError
from nearfar.format.manifest import File

ARRAYS = {
    "a.weight": np.arange(24, dtype=np.uint32).reshape(6, 4),
    "a.scales": np.linspace(0, 1, 9).astype(np.float16).reshape(3, 3),
    "norm": np.arange(7, dtype=np.float32),
    "b.weight": np.arange(40, dtype=np.uint32).reshape(10, 4),
}
SPECS = [TensorSpec(name, array.dtype.name, array.shape) for name, array in ARRAYS.items()]


def write(root: Path, file_bytes: int) -> tuple[File, ...]:
    with SafetensorsWriter(root, SPECS, file_bytes) as writer:
        for name, array in ARRAYS.items():
            for start in range(0, len(array), 4):  # rows come in slices, as from the stream of weights
                writer.write(name, array[start : start + 4])
        return writer.finish()


def test_one_file(tmp_path: Path) -> None:
    (record,) = write(tmp_path, 10**9)
    file = tmp_path / "model.safetensors"
    assert record == File(file.name, file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name]
    found = load_file(file)
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert read_header(file)[name].shape == array.shape
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_several_files_with_an_index(tmp_path: Path) -> None:
    records = write(tmp_path, 150)
    names = [record.file for record in records]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in ARRAYS.values())
    assert index["weight_map"] == {name: names[name == "b.weight"] for name in sorted(ARRAYS)}
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / file)[name], ARRAYS[name])


def test_what_comes_out_of_order_is_named(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path, SPECS) as writer:
        writer.write("a.weight", ARRAYS["a.weight"][:5])
        with pytest.raises(
            BuildError, match=r"'a.scales' float16, 18 bytes, came where a.weight uint32, 16 bytes"
        ):
            writer.write("a.scales", ARRAYS["a.scales"])
        with pytest.raises(BuildError, match="not all tensors"):
            writer.finish()


def test_the_dtype_must_be_the_one_in_the_header(tmp_path: Path) -> None:
    with (
        SafetensorsWriter(tmp_path, SPECS) as writer,
        pytest.raises(BuildError, match=r"'a\.weight' float32"),
    ):
        writer.write("a.weight", ARRAYS["a.weight"].astype(np.float32))
