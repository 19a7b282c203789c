"""Reads headers of GGUF files, which are untrusted: strictly, with nothing allocated from an unchecked
length.

Format (versions 2 and 3): https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. After the magic a
version, counts of tensors and of metadata; metadata as key, type, value; tensors as name, dimensions (the
fastest first), type and offset; then, aligned, the data.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Never

import ml_dtypes
import numpy as np

from nearfar.build.weights.headers import TensorEntry
from nearfar.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_LIMIT = 512 << 20
"""The most bytes of a header; the largest tokenizers take about ten million."""
LONGEST_NAME = 65535
DIMENSIONS = 4
ALIGNMENTS = tuple(1 << shift for shift in range(3, 17))
DEFAULT_ALIGNMENT = 32
NUMBERS: Mapping[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of metadata values that are numbers."""
FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9
AGAIN = "download or convert it again"


@dataclass(frozen=True)
class Type:
    """How a tensor's values are stored: `block` values in `bytes` bytes. `dtype`: for plain floats, else
    None.
    """

    name: str
    block: int
    bytes: int
    dtype: np.dtype[Any] | None = None


TYPES: Mapping[int, Type] = {
    0: Type("F32", 1, 4, np.dtype("<f4")),
    1: Type("F16", 1, 2, np.dtype("<f2")),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34),
    10: Type("Q2_K", 256, 84),
    11: Type("Q3_K", 256, 110),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    16: Type("IQ2_XXS", 256, 66),
    17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98),
    19: Type("IQ1_S", 256, 50),
    20: Type("IQ4_NL", 32, 18),
    21: Type("IQ3_S", 256, 110),
    22: Type("IQ2_S", 256, 82),
    23: Type("IQ4_XS", 256, 136),
    29: Type("IQ1_M", 256, 56),
    30: Type("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    34: Type("TQ1_0", 256, 54),
    35: Type("TQ2_0", 256, 66),
    39: Type("MXFP4", 32, 17),
}
"""The supported types of tensors, by ggml's numbers."""
OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4",
}  # fmt: skip
"""Names of unsupported types, for messages."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor. `shape`: with the rows first, unlike in the file; `entry`: the place of its bytes."""

    type: Type
    shape: tuple[int, ...]
    entry: TensorEntry

    def part(self, index: int) -> GgufTensor:
        """One of the tensors that lie one after the other in this one, along its first dimension."""
        held, size = self.entry, self.entry.bytes // self.shape[0]
        entry = replace(held, shape=held.shape[1:], offset=held.offset + index * size, bytes=size)
        return GgufTensor(self.type, self.shape[1:], entry)


@dataclass(frozen=True)
class Header:
    """The content of a header. Values of `metadata` are int, float, bool, str, a list of str or bool, or an
    array of numbers.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a file begins with GGUF's magic, whatever its name."""
    try:
        with path.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def read_header(file: Path) -> Header:
    """Read the header of one file. Raises CheckpointError where it is invalid."""
    try:
        with file.open("rb") as stream:
            return _Reader(file, stream, file.stat().st_size).header()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error}): {AGAIN}") from error


class _Reader:
    """Reads a header from its beginning; `_at` of `_size` bytes are read."""

    def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
        self._file, self._stream, self._size = file, stream, size
        self._at = 0

    def header(self) -> Header:
        if self._take(4, "its magic") != MAGIC:
            self._refuse("does not begin with GGUF: it is not a GGUF file")
        version = self._number("<u4", "its version")
        if version & 0xFFFF == 0 and version:
            self._refuse("is big-endian, which is not read: convert it for little-endian machines")
        if version not in VERSIONS:
            self._refuse(f"has version {version} of GGUF; {VERSIONS[0]} and {VERSIONS[1]} are read")
        tensors, pairs = (self._number("<u8", f"the count of {what}") for what in ("tensors", "metadata"))
        self._check_count(tensors, 24, "tensors")
        self._check_count(pairs, 13, "metadata")
        metadata: dict[str, Any] = {}
        for index in range(pairs):
            key = self._string(f"key {index} of its metadata", LONGEST_NAME)
            if key in metadata:
                self._refuse(f"has metadata {key!r} twice: {AGAIN}")
            metadata[key] = self._value(self._number("<u4", f"the type of {key!r}"), key)
        infos = self._infos(tensors)
        return Header(self._file, metadata, self._placed(infos, self._alignment(metadata)))

    def _infos(self, count: int) -> dict[str, tuple[Type, tuple[int, ...], int]]:
        """Type, shape and offset of each tensor, by name."""
        infos: dict[str, tuple[Type, tuple[int, ...], int]] = {}
        for index in range(count):
            name = self._string(f"the name of tensor {index}", LONGEST_NAME)
            if name in infos:
                self._refuse(f"has tensor {name!r} twice: {AGAIN}")
            dimensions = self._number("<u4", f"the dimensions of tensor {name!r}")
            if not 1 <= dimensions <= DIMENSIONS:
                self._refuse(f"tensor {name!r} has {dimensions:,} dimensions, not 1 to {DIMENSIONS}: {AGAIN}")
            extents = [self._number("<u8", f"a size of tensor {name!r}") for _ in range(dimensions)]
            number = self._number("<u4", f"the type of tensor {name!r}")
            offset = self._number("<u8", f"the offset of tensor {name!r}")
            infos[name] = (self._type(name, number, extents[0]), tuple(reversed(extents)), offset)
        return infos

    def _type(self, name: str, number: int, width: int) -> Type:
        if (kind := TYPES.get(number)) is None:
            known = ", ".join(each.name for each in TYPES.values())
            self._refuse(
                f"tensor {name!r} has type {OTHER_TYPES.get(number, number)}, which is not read: use a file "
                f"of {known}"
            )
        if width % kind.block:
            self._refuse(
                f"tensor {name!r} is {width:,} wide, no multiple of {kind.block} as {kind.name} needs: "
                f"{AGAIN}"
            )
        return kind

    def _placed(
        self, infos: Mapping[str, tuple[Type, tuple[int, ...], int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """Add the tensors' places, which must be within the file and must not overlap."""
        data = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, (kind, shape, offset) in infos.items():
            size = math.prod(shape) // kind.block * kind.bytes
            if offset % alignment:
                self._refuse(f"tensor {name!r} is at {offset:,}, no multiple of {alignment}: {AGAIN}")
            if offset + size > self._size - data:
                self._refuse(
                    f"tensor {name!r} should end at byte {data + offset + size:,}, the file has "
                    f"{self._size:,}: it is truncated, or its header lies; {AGAIN}"
                )
            stored = shape if kind.dtype else (*shape[:-1], shape[-1] // kind.block * kind.bytes)
            dtype = kind.dtype or np.dtype("u1")
            tensors[name] = GgufTensor(
                kind, shape, TensorEntry(self._file, dtype, stored, data + offset, size)
            )
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].entry.offset):
            if tensor.entry.offset < end:
                self._refuse(f"tensors {before!r} and {name!r} overlap: {AGAIN}")
            end, before = tensor.entry.offset + tensor.entry.bytes, name
        return tensors

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        found = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(found) is not int or found not in ALIGNMENTS:
            self._refuse(f"general.alignment is {found!r}; expected a power of two from 8 to 65536: {AGAIN}")
        return found

    def _value(self, kind: int, key: str) -> Any:
        """Read one metadata value of a type."""
        if kind in NUMBERS:
            found = self._number(NUMBERS[kind], key)
            # A float32 becomes its shortest decimal, as in config.json.
            return float(str(np.float32(found))) if kind == FLOAT32 else found
        if kind == BOOL:
            return bool(self._bools(1, key)[0])
        if kind == STRING:
            return self._string(repr(key))
        if kind != ARRAY:
            self._refuse(f"metadata {key!r} has unknown type {kind}: {AGAIN}")
        inner, count = (
            self._number("<u4", f"the type of {key!r}"),
            self._number("<u8", f"the length of {key!r}"),
        )
        if inner in NUMBERS:
            dtype = np.dtype(NUMBERS[inner])
            self._check_count(count, dtype.itemsize, f"values in {key!r}")
            return np.frombuffer(self._take(count * dtype.itemsize, repr(key)), dtype)
        if inner == BOOL:
            self._check_count(count, 1, f"values in {key!r}")
            return [bool(value) for value in self._bools(count, key)]
        if inner != STRING:
            what = "arrays, which are not read" if inner == ARRAY else f"unknown type {inner}"
            self._refuse(f"metadata {key!r} is an array of {what}: {AGAIN}")
        self._check_count(count, 8, f"texts in {key!r}")
        return [self._string(f"text {index} of {key!r}") for index in range(count)]

    def _bools(self, count: int, key: str) -> bytes:
        found = self._take(count, repr(key))
        if found.strip(b"\0\1"):
            self._refuse(f"metadata {key!r} has a truth value that is neither 0 nor 1: {AGAIN}")
        return found

    def _number(self, dtype: str, what: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self._take(kind.itemsize, what), kind)[0].item()

    def _string(self, what: str, longest: int = HEADER_LIMIT) -> str:
        length = struct.unpack("<Q", self._take(8, what))[0]
        if length > longest:
            self._refuse(f"{what} should be {length:,} bytes long: {AGAIN}")
        found = self._take(length, what)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError as error:
            self._refuse(f"{what} is not UTF-8 ({error}): {AGAIN}")

    def _check_count(self, count: int, least: int, what: str) -> None:
        """Raise CheckpointError where `count` items of at least `least` bytes do not fit into the rest of the
        file.
        """
        if count * least > self._size - self._at:
            self._refuse(
                f"says that it has {count:,} {what}, for which it is too short ({self._size:,} bytes): "
                f"{AGAIN}"
            )

    def _take(self, count: int, what: str) -> bytes:
        """Read the next bytes; the file's size is checked first."""
        if count > self._size - self._at:
            self._refuse(f"ends inside {what} (at byte {self._at:,}, {count:,} more should follow): {AGAIN}")
        if self._at + count > HEADER_LIMIT:
            self._refuse(f"has a header of more than {HEADER_LIMIT >> 20} MB (at {what}): {AGAIN}")
        found = self._stream.read(count)
        if len(found) != count:
            self._refuse(f"ends inside {what}, it has become shorter: {AGAIN}")
        self._at += count
        return found

    def _refuse(self, message: str) -> Never:
        raise CheckpointError(f"{self._file}: {message}")
