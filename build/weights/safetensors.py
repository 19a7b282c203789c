"""Writes safetensors as a stream: headers follow from the shapes, so bytes are written and hashed as they
arrive.

Format: 8 bytes of header length, a JSON header (padded with spaces to a multiple of 8), the tensors without
gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from nearfar.checkpoint_files import INDEX
from nearfar.errors import BuildError
from nearfar.format.hashed import HashedFiles
from nearfar.format.manifest import File
from nearfar.kernels.quantized import Array

FILE_BYTES = 5_000_000_000  # the most bytes of a file, as in mlx_lm.convert and transformers
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32"}
MLX: Mapping[str, str] = MappingProxyType({"format": "mlx"})
"""The metadata with which mlx-lm marks its files."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written; its dtype is a key of DTYPES."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class SafetensorsWriter(HashedFiles):
    """Writes `model.safetensors`, or several files with an index, from tensors that come in the order of
    their specs. Holds no tensor. `metadata`: the metadata of each file.
    """

    def __init__(
        self,
        root: Path,
        specs: Sequence[TensorSpec],
        file_bytes: int = FILE_BYTES,
        metadata: Mapping[str, str] = MLX,
    ) -> None:
        super().__init__(root)
        self._specs = {spec.name: spec for spec in specs}
        self._groups = _groups(specs, file_bytes)
        self._metadata = metadata
        self._order = iter(specs)
        self._current: TensorSpec | None = None
        self._left = 0  # bytes of the current tensor that are still to come
        self._in_file = 0  # tensors of the open file that are still to come

    def write(self, name: str, array: Array) -> None:
        """Append a tensor in C order: all of it, or its next rows."""
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
        if not self.is_open:
            self._begin_next()
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.put(data, f"tensor {name!r}", self._left)
        self._left -= array.nbytes
        if not self._left:
            self._in_file -= 1
            if not self._in_file:
                self.end()

    def finish(self) -> tuple[File, ...]:
        """Write the index where there are several files; gives the record of each file."""
        if self._left or len(self.files) < len(self._groups):
            raise BuildError(
                "not all tensors were written: this is a fault of the pipeline, please report it"
            )
        if len(self.files) > 1:
            total = sum(spec.bytes for spec in self._specs.values())
            files = zip(self._groups, self.files, strict=True)
            weight_map = {spec.name: record.file for group, record in files for spec in group}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            text = json.dumps(index, indent=1) + "\n"
            (self.root / INDEX).write_text(text, encoding="utf-8")
        return tuple(self.files)

    def _begin_next(self) -> None:
        """Open the next file and write its header."""
        at, count = len(self.files), len(self._groups)
        name = f"model-{at + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        group = self._groups[at]
        self._in_file = len(group)
        self.begin(name)
        self.put(header(group, self._metadata), f"the header of {name}", 0)


def header(specs: Sequence[TensorSpec], metadata: Mapping[str, str] = MLX) -> bytes:
    """The header's length and the header of a file that holds these tensors in this order."""
    records: dict[str, Any] = {"__metadata__": dict(metadata)}
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
    """Split the tensors, in order, into files: as many as fit, at least one for each."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.bytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.bytes
    return groups
