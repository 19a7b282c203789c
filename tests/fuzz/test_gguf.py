"""Untrusted GGUF files: bytes of the header are changed, cut, or give wrong values."""

from __future__ import annotations

import functools
import struct
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.weights.gguf.container import GgufCheckpoint
from nearfar.build.weights.gguf.header import read_header
from nearfar.errors import CheckpointError, NearfarError
from nearfar.step.reading import read_model
from tests.fuzz.effort import effort
from tests.support import gguf_files
from tests.support.quantized import CONFIG, weights, write

ABSURD = (0, 1, 2, 255, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


@functools.cache
def whole() -> bytes:
    """A file with quantized and other tensors."""
    with tempfile.TemporaryDirectory() as folder:
        plain = write(Path(folder) / "plain", CONFIG, weights())
        file = gguf_files.write(
            plain,
            Path(folder) / "x",
            lambda name, value: (gguf_files.random_rows("Q4_0", *value.shape), "Q4_0"),
        )
        return file.read_bytes()


@functools.cache
def header_bytes() -> int:
    """The offset at which the tensors begin."""
    return min(tensor.entry.offset for tensor in parsed(whole()).tensors.values())


def parsed(data: bytes) -> Any:
    """The header of these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x"
        file.write_bytes(data)
        return read_header(file)


def look(data: bytes) -> None:
    """Open the file and read rows of everything; only our own errors may be raised."""
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        file = Path(folder) / "x"
        file.write_bytes(data)
        try:
            source = open_source(BuildOptions(str(file), Path(folder) / "out", targets=("mlx",)))
            for name in source.checkpoint.entries:
                source.checkpoint.read(name, 1, 3)
            for name in source.quantized.tensors if source.quantized else ():
                source.quantized.weights(name, 1, 3)
        except NearfarError:
            pass


@effort(60)
@given(st.data())
def test_changed_bytes_are_refused_or_make_sense(data: st.DataObject) -> None:
    made = bytearray(whole())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header_bytes() - 8) | st.integers(0, 2000))
        value = data.draw(st.sampled_from(ABSURD) | st.integers(0, 2**64 - 1))
        size = data.draw(st.sampled_from([1, 4, 8]))
        made[at : at + size] = struct.pack("<Q", value)[:size]
    look(bytes(made))


@effort(40)
@given(st.integers(0, 10**9))
def test_a_file_that_ends_early_is_refused(at: int) -> None:
    with pytest.raises(CheckpointError):
        parsed(whole()[: at % (len(whole()) - 64)])


HEAD = b"GGUF" + struct.pack("<I", 3)


def string(text: bytes, length: int | None = None) -> bytes:
    """A string in GGUF's format."""
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(name: bytes, extents: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor's entry in the header."""
    sizes = struct.pack(f"<I{len(extents)}Q", len(extents), *extents)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


HOSTILE = {
    "too short": (b"GG", "ends inside its magic"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
    "another version": (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
    "tensors without end": (HEAD + struct.pack("<QQ", 2**62, 0), r"4,611,686,018,427,387,904 tensors"),
    "metadata without end": (HEAD + struct.pack("<QQ", 0, 2**63), "metadata, for which it is too short"),
    "a key without end": (HEAD + struct.pack("<QQ", 0, 1) + string(b"", 2**63) + bytes(32), "key 0"),
    "an array without end": (
        HEAD + struct.pack("<QQ", 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 6, 2**61) + bytes(8),
        r"2,305,843,009,213,693,952 values in 'k'",
    ),
    "arrays of arrays": (
        HEAD + struct.pack("<QQ", 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
        "'k' is an array of arrays",
    ),
    "an unknown type": (HEAD + struct.pack("<QQ", 0, 1) + string(b"k") + struct.pack("<I", 77), "type 77"),
    "a key twice": (HEAD + struct.pack("<QQ", 0, 2) + (string(b"k") + b"\0\0\0\0\1") * 2, "'k' twice"),
    "a tensor twice": (HEAD + struct.pack("<QQ", 2, 0) + tensor(b"t", (1,), 0, 0) * 2, "'t' twice"),
    "a tensor beyond the end": (
        HEAD + struct.pack("<QQ", 1, 0) + tensor(b"t", (2**32, 2**31), 0, 0) + bytes(64),
        "'t' should end at byte",
    ),
    "tensors that overlap": (
        HEAD + struct.pack("<QQ", 2, 0) + tensor(b"a", (16,), 0, 0) + tensor(b"b", (16,), 0, 32) + bytes(200),
        "'a' and 'b' overlap",
    ),
    "no whole blocks": (HEAD + struct.pack("<QQ", 1, 0) + tensor(b"t", (33,), 2, 0) + bytes(64), "33 wide"),
    "a type that is not read": (HEAD + struct.pack("<QQ", 1, 0) + tensor(b"t", (256,), 40, 0), "NVFP4"),
    "dimensions without end": (HEAD + struct.pack("<QQ", 1, 0) + string(b"t") + b"\xff" * 32, "dimensions"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_are_refused_by_name(what: str) -> None:
    data, expected = HOSTILE[what]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=expected):
            parsed(data)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


STRANGE: tuple[Any, ...] = (
    0, -1, 2**63, 0.0, float("nan"), float("inf"), True, "", "none", "llama", [], ["a", "b"], [True, False],
    np.array([np.inf, np.nan], np.float32), np.array([1, 2], np.int32), np.array([], np.uint8),
)  # fmt: skip


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_metadata_of_other_types_are_refused_or_make_sense(model: str) -> None:
    header = parsed(whole())
    scores = np.zeros(len(header.metadata["tokenizer.ggml.tokens"]), np.float32)
    own = {"tokenizer.ggml.model": model} | ({"tokenizer.ggml.scores": scores} if model == "llama" else {})
    plain = {key: value for key, value in header.metadata.items() if model == "gpt2" or "merges" not in key}
    keys = [*plain, *own, *EXTRA]
    opened = 0
    for key in keys:
        for value in STRANGE:
            changed = replace(header, metadata={**plain, **own, key: value})
            try:
                made = GgufCheckpoint("x", [changed], header.tensors)
                read_model(made.config, made.entries)
                opened += 1
            except CheckpointError:
                pass
    assert 0 < opened < len(keys) * len(STRANGE) / 2


EXTRA = (
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count",
    "llama.attention.sliding_window", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.scores", "tokenizer.ggml.unknown_token_id",
)  # fmt: skip


def test_the_package_reads_what_we_read(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(whole())
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    ours = read_header(file).tensors
    assert set(ours) == set(theirs)
    for name, found in ours.items():
        assert (found.entry.offset, found.entry.bytes) == (theirs[name].data_offset, theirs[name].n_bytes)
