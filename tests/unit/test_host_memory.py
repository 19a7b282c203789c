"""Weights that are larger than memory are mapped: files one after the other, with the same content as if
read.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from nearfar.edge_runtime.executors.cpu import host_memory
from nearfar.errors import ArtifactError

pytestmark = pytest.mark.skipif(not host_memory.MAPS, reason="files are mapped on Linux only")
APART = 4 * mmap.PAGESIZE


def written(folder: Path, sizes: list[int]) -> tuple[list[tuple[Path, int]], np.ndarray]:
    """Files of random bytes, and the bytes one after the other."""
    rng, files, whole = np.random.default_rng(0), [], []
    for index, size in enumerate(sizes):
        content = rng.integers(0, 256, size, dtype=np.uint8)
        path = folder / f"{index}.bin"
        path.write_bytes(content.tobytes())
        files.append((path, size))
        whole.append(content)
    return files, np.concatenate(whole)


def test_mapped_files_are_one_stream(tmp_path: Path) -> None:
    files, whole = written(tmp_path, [APART, APART, 1000])
    stream = host_memory.mapped(files, APART)
    assert (stream == whole).all()
    across = stream[APART - 8 : APART + 8].view(np.uint32)
    assert (across == whole[APART - 8 : APART + 8].view(np.uint32)).all()


def test_a_file_that_is_too_short_is_named(tmp_path: Path) -> None:
    files, _ = written(tmp_path, [APART, 1000])
    files[1][0].write_bytes(b"short")
    with pytest.raises(ArtifactError, match=r"1\.bin is truncated"):
        host_memory.mapped(files, APART)


def test_the_free_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_memory.fits(1)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100}))
    assert host_memory.fits(100)
    assert not host_memory.fits(101)
