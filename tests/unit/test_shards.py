"""The weight stream: alignment, cuts, hashes, a full disk."""

import errno
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.build.weights.shards import ShardWriter
from nearfar.errors import BuildError
from nearfar.format.hashed import HashedFiles
from nearfar.room import disk_error


def test_stream_is_cut_and_hashed(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(100, dtype=np.uint8),
        "b": np.arange(700, dtype=np.float32).reshape(7, 100),
        "c": np.ones(3, np.float16),
        "d": np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        "e": np.float32(2.5).reshape(()),
    }
    with ShardWriter(tmp_path, shard_bytes=1024) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        files, tensors = writer.finish()
    parts = [(tmp_path / file.file).read_bytes() for file in files]
    stream = b"".join(parts)
    assert [file.file for file in files] == [f"weights/{i:05d}.bin" for i in range(len(files))]
    assert all(len(part) == 1024 for part in parts[:-1])
    assert [file.bytes for file in files] == [len(part) for part in parts]
    assert [file.sha256 for file in files] == [hashlib.sha256(part).hexdigest() for part in parts]
    assert [tensor.name for tensor in tensors] == list(arrays)
    for tensor in tensors:
        assert tensor.offset % 256 == 0
        data = stream[tensor.offset : tensor.offset + tensor.bytes]
        found = np.frombuffer(data, tensor.dtype).reshape(tensor.shape)
        np.testing.assert_array_equal(found, arrays[tensor.name])


def test_a_border_on_a_tensor_end_leaves_no_empty_shard(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, shard_bytes=256) as writer:
        writer.add("a", np.zeros(512, np.uint8))
        files, _ = writer.finish()
    assert [file.bytes for file in files] == [256, 256]
    assert sorted(file.name for file in (tmp_path / "weights").iterdir()) == ["00000.bin", "00001.bin"]


def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="1000"):
        ShardWriter(tmp_path, shard_bytes=1000)
    with ShardWriter(tmp_path) as writer:
        writer.add("a", np.zeros(4))
        with pytest.raises(BuildError, match="'a' was added twice"):
            writer.add("a", np.zeros(4))


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr(HashedFiles, "begin", lambda self, name: setattr(self, "_file", Full()))
    with ShardWriter(tmp_path) as writer, pytest.raises(BuildError) as caught:
        writer.add("layers.0.qkv.codes", np.zeros(123456, np.uint8))
    for part in ("full", "layers.0.qkv.codes", "123,456", "are free"):
        assert part in str(caught.value)


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    with ShardWriter(tmp_path) as writer, pytest.raises(BuildError, match="cannot write"):
        writer.add("a", np.zeros(4))


def test_a_file_that_cannot_be_written_is_named_once() -> None:
    error = OSError(errno.EROFS, "Read-only file system")
    told = "cannot write /store/models: Read-only file system: check permissions and the disk"
    assert str(disk_error(error, Path("/store"), "/store/models", 1)) == told
