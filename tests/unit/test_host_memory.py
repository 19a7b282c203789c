"""Weights that are larger than memory are mapped, or read when their expert is chosen: files one after the
other, with the same content as if read.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from nearfar.edge_runtime.executors.cpu import expert_memory, host_memory
from nearfar.edge_runtime.executors.cpu.expert_memory import ExpertMemory, room_for
from nearfar.errors import ArtifactError
from nearfar.memory import HostMemory

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
    monkeypatch.setattr(host_memory, "host_memory", lambda: HostMemory(1000, 100))
    assert host_memory.fits(100)
    assert not host_memory.fits(101)


def test_experts_take_the_place_of_those_that_were_used_longest_ago(tmp_path: Path) -> None:
    """Matrices begin and end anywhere, also in two files, and have their content whenever they are held."""
    files, whole = written(tmp_path, [APART, APART, 3 * mmap.PAGESIZE + 1000])
    each = mmap.PAGESIZE + 700
    matrices = [(start, each) for start in range(256, len(whole) - each, each)]
    memory = ExpertMemory(files, APART, 3 * each)
    rng = np.random.default_rng(1)
    for _ in range(40):
        chosen = [matrices[i] for i in rng.choice(len(matrices), 2, replace=False)]
        memory.hold(chosen)
        for start, size in chosen:
            assert (memory.area[start : start + size] == whole[start : start + size]).all()
        assert set(memory._held) >= set(chosen)
        assert memory._bytes == len(memory._held) * each <= 3 * each
    memory.close()


def test_an_expert_that_cannot_be_read_is_not_held(tmp_path: Path) -> None:
    files, whole = written(tmp_path, [APART, APART])
    memory = ExpertMemory(files, APART, APART)
    content = files[1][0].read_bytes()
    files[1][0].write_bytes(content[:100])
    with pytest.raises(ArtifactError, match=r"1\.bin is truncated"):
        memory.hold([(APART, 8000)])
    files[1][0].write_bytes(content)
    memory.hold([(APART, 8000)])
    assert (memory.area[APART : APART + 8000] == whole[APART : APART + 8000]).all()
    memory.close()
    with pytest.raises(ArtifactError, match=r"1\.bin is truncated"):
        ExpertMemory([files[0], (files[1][0], 2 * APART)], APART, APART)


def test_experts_get_the_memory_that_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts, two tensors, must have room; the files are mapped otherwise."""
    monkeypatch.setattr(expert_memory, "host_memory", lambda: HostMemory(3200, 1600))
    assert room_for(500, [400, 300]) == 1000
    assert room_for(500, [501]) is None
    assert room_for(500, []) is None


def test_weights_may_lie_in_huge_pages_and_caches_may_not() -> None:
    """Linux gives huge pages to private memory alone. A cache is used in part, and would take more in huge
    pages.
    """

    def flags(area: np.ndarray) -> list[str]:
        lines = iter(Path("/proc/self/smaps").read_text(encoding="ascii").splitlines())
        for line in lines:
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(found[1], 16) <= area.ctypes.data < int(found[2], 16)
            elif inside and line.startswith("VmFlags:"):
                return line.split()[1:]
        raise AssertionError("no such memory")

    weights, cache = host_memory.reserve(4 << 20, whole=True), host_memory.reserve(4 << 20)
    assert "hg" not in flags(cache)
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no huge pages")
    assert "hg" in flags(weights)
    assert "sh" not in flags(weights)
