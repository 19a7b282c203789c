"""Writing the weight stream: tensors at aligned offsets of one logical stream that is cut into shard
files.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from nearfar.errors import BuildError
from nearfar.format.manifest import File, Tensor
from nearfar.kernels.quantized import Array
from nearfar.room import disk_error

ALIGNMENT = 256
SHARD_BYTES = 32 << 20
PIECE_BYTES = 4 << 20  # written and hashed at a time


class ShardWriter:
    """Writes `weights/00000.bin …` under an artifact's directory, a tensor at a time; holds no tensor.

    A tensor starts at the next multiple of 256 and may span shards; shard i holds the bytes from i *
    shard_bytes. Use it as a context manager: an exception closes the open file.
    """

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        if shard_bytes <= 0 or shard_bytes % ALIGNMENT:
            raise BuildError(
                f"shard size {shard_bytes} is no positive multiple of {ALIGNMENT}: choose one that is"
            )
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._shards: list[File] = []
        self._tensors: dict[str, Tensor] = {}
        self._offset = 0
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def add(self, name: str, array: Array) -> None:
        """Append a tensor (little-endian, C order). BuildError for a name given twice or a full disk."""
        if name in self._tensors:
            raise BuildError(
                f"weight {name!r} was added twice: this is a fault of the pipeline, please report it"
            )
        self._write(memoryview(bytes(-self._offset % ALIGNMENT)), name)
        array = np.ascontiguousarray(array)
        if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
            array = array.astype(array.dtype.newbyteorder("<"))
        shape = tuple(int(extent) for extent in array.shape)
        self._tensors[name] = Tensor(name, array.dtype.name, shape, self._offset, array.nbytes)
        self._write(array.reshape(-1).view(np.uint8).data, name)

    def finish(self) -> tuple[tuple[File, ...], tuple[Tensor, ...]]:
        """Close the last shard; the manifest's `weights.shards` and `weights.tensors`."""
        self._close_shard()
        return tuple(self._shards), tuple(self._tensors.values())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, data: memoryview[Any], name: str) -> None:
        """Append bytes to the stream, opening and closing shards as it crosses their borders."""
        while len(data):
            room = self._shard_bytes - self._offset % self._shard_bytes
            piece = data[: min(room, PIECE_BYTES)]
            try:
                if self._file is None:
                    self._file = self._open_shard()
                self._file.write(piece)
            except OSError as error:
                raise disk_error(error, self._directory, f"weight {name!r}", len(data)) from error
            self._digest.update(piece)
            self._offset += len(piece)
            data = data[len(piece) :]
            if self._offset % self._shard_bytes == 0:
                self._close_shard()

    def _open_shard(self) -> BinaryIO:
        """Open the file of the shard that the stream has come to."""
        path = self._directory / self._shard_name()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._digest = hashlib.sha256()
        return path.open("wb")

    def _close_shard(self) -> None:
        """Close the open shard, on disk for good, and record it."""
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise disk_error(error, self._directory, self._shard_name(), 0) from error
        self._file = None
        start = len(self._shards) * self._shard_bytes
        self._shards.append(File(self._shard_name(), self._offset - start, self._digest.hexdigest()))

    def _shard_name(self) -> str:
        """Path of the current shard in the artifact."""
        return f"weights/{len(self._shards):05d}.bin"
