"""Tensors in files beside the graph (ONNX's external data), each file below 2 GB."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nearfar.errors import BuildError
from nearfar.format.hashed import HashedFiles
from nearfar.format.manifest import File
from nearfar.kernels.quantized import Array

ALIGNMENT = 4096
"""Alignment of a large tensor's offset: ONNX Runtime maps files, so offsets are multiples of a page."""
SMALL = 1 << 16
SMALL_ALIGNMENT = 64
PART_BYTES = 2_000_000_000
"""The most bytes of a file: a browser's buffer, and a protocol buffer, hold less than 2 GiB."""


@dataclass(frozen=True)
class Placed:
    """The place of a tensor in a file. `file`: the path relative to the graph's folder."""

    file: str
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


class ExternalWriter(HashedFiles):
    """Appends tensors to `<stem>`, `<stem>_1`, `<stem>_2` …, the names that Transformers.js expects."""

    def __init__(self, root: Path, stem: str, part_bytes: int) -> None:
        """`stem`: a path relative to `root`. `part_bytes`: the most bytes of a file."""
        super().__init__(root)
        self._stem, self._part_bytes = stem, part_bytes
        self._offset = 0

    def add(self, name: str, array: Array) -> Placed:
        """Append a tensor (little-endian, C order); BuildError if it is larger than a file, or the disk is
        full.
        """
        array = np.ascontiguousarray(array)
        data = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if data.nbytes > self._part_bytes:
            raise BuildError(
                f"{name} takes {data.nbytes:,} bytes, more than a file of target onnx may hold "
                f"({self._part_bytes:,}): quantize it (--quant q4)"
            )
        unit = SMALL_ALIGNMENT if data.nbytes < SMALL else ALIGNMENT
        padding = -self._offset % unit
        if not self.is_open or self._offset + padding + data.nbytes > self._part_bytes:
            self.end()
            self.begin(f"{self._stem}_{len(self.files)}" if self.files else self._stem)
            self._offset = padding = 0
        self.put(bytes(padding), f"tensor {name!r}", data.nbytes)
        self.put(data.reshape(-1).view(np.uint8).data, f"tensor {name!r}", data.nbytes)
        offset = self._offset + padding
        self._offset = offset + data.nbytes
        return Placed(Path(self.name).name, offset, data.nbytes, data.dtype.name, data.shape)

    def finish(self) -> tuple[File, ...]:
        """Close the last file; returns the records of all files."""
        self.end()
        return tuple(self.files)
