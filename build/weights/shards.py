"""Writes the weight stream: tensors at aligned offsets of one logical stream that is cut into shard files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.errors import BuildError
from nearfar.format.hashed import HashedFiles
from nearfar.format.manifest import File, Tensor
from nearfar.kernels.quantized import Array

ALIGNMENT = 256
SHARD_BYTES = 32 << 20
PIECE_BYTES = 4 << 20  # bytes that are written and hashed at a time


class ShardWriter(HashedFiles):
    """Writes `weights/00000.bin …` in an artifact's directory, one tensor at a time; holds no tensor.

    A tensor starts at the next multiple of 256 and may span shards; shard i holds the bytes from i *
    shard_bytes.
    """

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        if shard_bytes <= 0 or shard_bytes % ALIGNMENT:
            raise BuildError(
                f"shard size {shard_bytes} is not a positive multiple of {ALIGNMENT}: choose one that is"
            )
        super().__init__(directory)
        self._shard_bytes = shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._offset = 0

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
        """Close the last shard; gives the manifest's `weights.shards` and `weights.tensors`."""
        self.end()
        return tuple(self.files), tuple(self._tensors.values())

    def _write(self, data: memoryview[Any], name: str) -> None:
        """Append bytes to the stream, opening and closing shards at their borders."""
        while len(data):
            if not self.is_open:
                self.begin(f"weights/{len(self.files):05d}.bin")
            room = self._shard_bytes - self._offset % self._shard_bytes
            piece = data[: min(room, PIECE_BYTES)]
            self.put(piece, f"weight {name!r}", len(data))
            self._offset += len(piece)
            data = data[len(piece) :]
            if self._offset % self._shard_bytes == 0:
                self.end()
