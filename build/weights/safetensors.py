"""Writing safetensors as a stream: the headers follow from the shapes, so the bytes can be written and hashed
as they come.

Format: 8 bytes of header length, a JSON header (padded with spaces to a multiple of 8), the tensors without
gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from nearfar.checkpoint_files import INDEX
from nearfar.errors import BuildError
from nearfar.format.manifest import File
from nearfar.kernels.quantized import Array
from nearfar.room import disk_error

FILE_BYTES = 5_000_000_000  # of a file, as mlx_lm.convert and transformers cut them
DTYPES = {"float32": "F32", "float16": "F16", "uint32": "U32"}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that will be written: its dtype is a key of DTYPES."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class SafetensorsWriter:
    """Writes `model.safetensors`, or several files with an index, from tensors that come in the order of
    their specs.

    Holds no tensor. Use it as a context manager: an exception closes the open file.
    """

    def __init__(self, root: Path, specs: Sequence[TensorSpec], file_bytes: int = FILE_BYTES) -> None:
        self._root = root
        self._specs = {spec.name: spec for spec in specs}
        self._groups = _groups(specs, file_bytes)
        self._order = iter(specs)
        self._current: TensorSpec | None = None
        self._left = 0  # bytes of the current tensor still to come
        self._files: list[File] = []
        self._in_file = 0  # tensors still to come of the open file
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def write(self, name: str, array: Array) -> None:
        """Append bytes of a tensor, C order: all of it, or its next rows."""
        if not self._left:
            self._current = next(self._order, None)
            self._left = self._current.bytes if self._current else 0
        spec = self._current
        if spec is None or spec.name != name or array.dtype.name != spec.dtype or array.nbytes > self._left:
            expected = f"{spec.name} {spec.dtype}, {self._left} bytes" if spec else "nothing more"
            raise BuildError(
                f"tensor {name!r} {array.dtype.name}, {array.nbytes} bytes, came where {expected} should: "
                "this is a fault of the pipeline, please report it"
            )
        try:
            if self._file is None:
                self._file = self._open()
            self._put(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            self._left -= array.nbytes
            if not self._left:
                self._in_file -= 1
                if not self._in_file:
                    self._close()
        except OSError as error:
            raise disk_error(error, self._root, f"tensor {name!r}", self._left) from error

    def finish(self) -> tuple[File, ...]:
        """Write the index where there are several files; the record of each file."""
        if self._left or len(self._files) < len(self._groups):
            raise BuildError(
                "not all tensors were written: this is a fault of the pipeline, please report it"
            )
        if len(self._files) > 1:
            total = sum(spec.bytes for spec in self._specs.values())
            files = zip(self._groups, self._files, strict=True)
            weight_map = {spec.name: record.file for group, record in files for spec in group}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            text = json.dumps(index, indent=1) + "\n"
            (self._root / INDEX).write_text(text, encoding="utf-8")
        return tuple(self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _name(self) -> str:
        count = len(self._groups)
        return (
            "model.safetensors"
            if count == 1
            else f"model-{len(self._files) + 1:05d}-of-{count:05d}.safetensors"
        )

    def _open(self) -> BinaryIO:
        """Open the next file and write its header."""
        group = self._groups[len(self._files)]
        self._in_file = len(group)
        self._digest = hashlib.sha256()
        self._file = (self._root / self._name()).open("wb")
        self._put(memoryview(header(group)))
        return self._file

    def _put(self, data: memoryview[Any]) -> None:
        assert self._file is not None
        self._file.write(data)
        self._digest.update(data)

    def _close(self) -> None:
        """Close the open file, on disk for good, and record it."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        self._file = None
        self._files.append(File(self._name(), size, self._digest.hexdigest()))


def header(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and header of a file that holds these tensors in this order. mlx-lm marks its files `format:
    mlx`.
    """
    records: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "mlx"})}
    offset = 0
    for spec in specs:
        records[spec.name] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.bytes],
        }
        offset += spec.bytes
    text = json.dumps(records, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _groups(specs: Sequence[TensorSpec], file_bytes: int) -> list[list[TensorSpec]]:
    """The tensors of each file: in order, as many as fit, at least one."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.bytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.bytes
    return groups
