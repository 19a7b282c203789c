"""The file of a snapshot is written completely or not at all, and every altered byte is noticed."""

from __future__ import annotations

import functools
import json
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from nearfar.edge_runtime.snapshots import file
from nearfar.errors import SnapshotError
from tests.support.paths import ROOT

TENSORS = {
    "tokens": np.arange(4, dtype=np.int32),
    "layers.0.k": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 4, 3),
    "layers.0.v": np.linspace(-2, 2, 24, dtype=np.float16).reshape(2, 4, 3),
    "layers.0.k.codes": np.arange(8, dtype=np.uint32).reshape(1, 4, 2),
}
METADATA = {"model": "a" * 64, "prompt": 'quotes " and "sha256":"' + "0" * 64 + '" ünïcode 👩'}


@functools.cache
def written() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.snap")
        file.write(path, METADATA, TENSORS)
        return path.read_bytes()


def refused(path: Path, data: bytes, match: str = "") -> None:
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=match or None):
        file.read(path)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_what_was_written_is_read_again_by_us_and_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "a.snap"
    seen: list[tuple[int, int]] = []
    file.write(path, METADATA, TENSORS, progress=lambda done, total: seen.append((done, total)))
    total = sum(array.nbytes for array in TENSORS.values())
    assert seen[-1] == (total, total)
    metadata, tensors = file.read(path)
    assert {name: metadata[name] for name in METADATA} == METADATA
    for found in (tensors, load_file(path)):
        assert found.keys() == TENSORS.keys()
        for name, array in TENSORS.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)
    with safe_open(path, "np") as opened:
        assert opened.metadata() == metadata
    assert names(tmp_path) == ["a.snap"]


@settings(deadline=None, max_examples=300)
@given(position=st.integers(0, len(written()) - 1), flip=st.integers(1, 255))
def test_any_altered_byte_is_refused(position: int, flip: int) -> None:
    data = bytearray(written())
    data[position] ^= flip
    with tempfile.TemporaryDirectory() as folder:
        refused(Path(folder, "a.snap"), bytes(data))


def test_any_truncation_is_refused(tmp_path: Path) -> None:
    for length in range(len(written())):
        refused(tmp_path / "a.snap", written()[:length])
    refused(
        tmp_path / "a.snap",
        written()[:-1],
        f"is truncated: {len(written()) - 1:,} bytes, not {len(written()):,}",
    )
    refused(tmp_path / "a.snap", written()[:40], "is not a snapshot|is truncated")
    refused(tmp_path / "a.snap", written() + b"x", "bytes beyond its end")


def test_refusals_name_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.snap"
    refused(path, written().replace(b'"version":"2"', b'"version":"3"', 1), "version 3, newer than.*Upgrade")
    refused(
        path,
        written().replace(b'"version":"2"', b'"version":"1"', 1),
        "version 1, which an earlier.*Save it again",
    )
    refused(path, b"once upon a time", "is not a snapshot")
    refused(path, b"", "is not a snapshot|truncated")
    refused(path, written()[:-1] + b"\x55", "damaged: SHA-256 [0-9a-f]{64}, it was written with [0-9a-f]{64}")
    with pytest.raises(SnapshotError, match="No such file"):
        file.read(tmp_path / "absent")
    with pytest.raises(SnapshotError, match="directory"):
        file.read(tmp_path)
    length = int.from_bytes(written()[:8], "little")
    header = json.loads(written()[8 : 8 + length])
    header["tokens"]["data_offsets"] = [0, 12]
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    refused(
        path,
        len(text).to_bytes(8, "little") + text + written()[8 + length :],
        "does not describe its tensors",
    )


def test_only_snapshots_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.snap"
    path.write_text("precious")
    with pytest.raises(SnapshotError, match="not a snapshot, so it is not overwritten"):
        file.write(path, METADATA, TENSORS)
    assert path.read_text() == "precious"
    file.write(path, METADATA, TENSORS, force=True)
    file.write(path, {"model": "b"}, TENSORS)
    assert file.read(path)[0]["model"] == "b"
    with pytest.raises(SnapshotError, match="is a directory"):
        file.write(tmp_path, METADATA, TENSORS, force=True)
    with pytest.raises(SnapshotError, match="not an ordinary file"):
        file.write(Path("/dev/null"), METADATA, TENSORS, force=True)
    with pytest.raises(SnapshotError, match="does not exist"):
        file.write(tmp_path / "no" / "a.snap", METADATA, TENSORS)
    assert names(tmp_path) == ["a.snap"]


def test_a_disk_without_room_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.snap"
    file.write(path, METADATA, TENSORS)
    big = {"layers.0.k": np.zeros((1, 1 << 20, 2), np.float32)}
    soft, hard = resource.getrlimit(
        resource.RLIMIT_FSIZE
    )  # the next best thing to a small disk: files may not grow past this
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, hard))
    try:
        with pytest.raises(
            SnapshotError, match=r"cannot write .*; it takes 8,388,608 bytes, [\d,]+ are free there"
        ):
            file.write(path, METADATA, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["a.snap"]
    assert file.read(path)[1].keys() == TENSORS.keys(), "the earlier one is still whole"


def test_a_writer_that_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "PIECE_BYTES", 16)
    stop, done = threading.Event(), []

    def progress(written: int, _: int) -> None:
        done.append(written)
        if len(done) == 3:
            stop.set()

    file.write(tmp_path / "a.snap", METADATA, TENSORS, progress=progress, stop=stop)
    assert len(done) == 3
    assert names(tmp_path) == []


SAVER = """
import sys, time
from tests.support import tiny
from tests.unit.test_api import make
from nearfar.edge_runtime import Engine
def progress(done, total):
    print("writing", flush=True)
    time.sleep(0.2)
from nearfar.edge_runtime.snapshots import file
file.PIECE_BYTES = 256
with Engine(make()) as engine:
    engine.save_cache(sys.argv[1], tokens=list(range(96)), progress=progress)
"""


def test_ctrl_c_while_saving_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path / "a.snap")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert len(names(tmp_path)) == 1, "the partial file is there"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert names(tmp_path) == []
