"""Tensors in files beside the graph (ONNX's external data), each file below 2 GB."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from nearfar.errors import BuildError
from nearfar.format.manifest import File
from nearfar.kernels.quantized import Array
from nearfar.room import disk_error

ALIGNMENT = 4096
"""Alignment of a large tensor's offset: ONNX Runtime maps files, and pages begin there."""
SMALL = 1 << 16
SMALL_ALIGNMENT = 64
PART_BYTES = 2_000_000_000
"""A browser's buffer, and a protocol buffer, hold less than 2 GiB."""


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies. `file`: relative to the graph's folder."""

    file: str
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


class ExternalWriter:
    """Appends tensors to `<stem>`, `<stem>_1`, `<stem>_2` …: names that Transformers.js counts up."""

    def __init__(self, root: Path, stem: str, part_bytes: int) -> None:
        """`stem`: a path relative to `root`. `part_bytes`: of a file, at most."""
        self._root, self._stem, self._part_bytes = root, stem, part_bytes
        self._open: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._offset = 0
        self._files: list[File] = []

    def add(self, name: str, array: Array) -> Placed:
        """Append a tensor (little-endian, C order). BuildError where it, or the disk, is too full."""
        array = np.ascontiguousarray(array)
        data = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if data.nbytes > self._part_bytes:
            raise BuildError(
                f"{name} takes {data.nbytes:,} bytes, more than a file of target onnx may hold "
                f"({self._part_bytes:,}): quantize it (--quant q4)"
            )
        unit = SMALL_ALIGNMENT if data.nbytes < SMALL else ALIGNMENT
        padding = -self._offset % unit
        if self._open is None or self._offset + padding + data.nbytes > self._part_bytes:
            self._close()
            padding = 0
        try:
            self._write(bytes(padding))
            offset = self._offset
            self._write(data.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise disk_error(error, self._root, f"tensor {name!r}", data.nbytes) from error
        return Placed(Path(self._file).name, offset, data.nbytes, data.dtype.name, data.shape)

    def finish(self) -> tuple[File, ...]:
        """Close the last file; all of them."""
        self._close()
        return tuple(self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.close()

    @property
    def _file(self) -> str:
        return self._stem if not self._files else f"{self._stem}_{len(self._files)}"

    def _write(self, data: bytes | memoryview) -> None:
        if self._open is None:
            path = self._root / self._file
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open = path.open("xb")
        self._open.write(data)
        self._digest.update(data)
        self._offset += len(data)

    def _close(self) -> None:
        if self._open is None:
            return
        try:
            self._open.flush()
            os.fsync(self._open.fileno())
            self._open.close()
        except OSError as error:
            raise disk_error(error, self._root, self._file, 0) from error
        self._files.append(File(self._file, self._offset, self._digest.hexdigest()))
        self._open, self._offset, self._digest = None, 0, hashlib.sha256()
