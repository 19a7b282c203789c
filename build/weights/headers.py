"""Reads headers of safetensors files, which are untrusted: strictly, so that no tensor can have another's
bytes.

Format: https://github.com/huggingface/safetensors#format. Everything that the library's own reader rejects is
rejected here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from nearfar import strict_json
from nearfar.errors import CheckpointError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U32": np.dtype("<u4"),  # MLX's packed codes
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
HEADER_LIMIT = 100_000_000  # bytes; the safetensors library has the same limit


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor: `file`, absolute byte `offset` in it, length in `bytes`."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    bytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """List the tensors of one safetensors file (8 bytes of header length, a JSON header, the data), bounds
    checked.
    """
    try:
        stream = file.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error}): download or copy it again") from error
    with stream:
        size = file.stat().st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise CheckpointError(
                f"{file}: its header should be {length:,} bytes, the file has {size:,}: it is truncated or "
                "no safetensors file; download it again"
            )
        text = stream.read(length)
    try:
        header = strict_json.loads(text.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{file}: unreadable safetensors header ({error}): download it again"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its safetensors header is not a JSON object: download it again")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{file}: __metadata__ of its header is not an object of strings: download it again"
        )
    entries = {name: _entry(file, name, record, 8 + length) for name, record in header.items()}
    _check_tiling(file, entries, 8 + length, size)
    return entries


def _entry(file: Path, name: str, record: object, data: int) -> TensorEntry:
    """Convert one header record, after checking its byte range against dtype and shape."""
    known = record if isinstance(record, dict) else {}
    code, extents, offsets = (known.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(code, str) or not _naturals(extents) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: tensor {name!r} has no valid dtype, shape and data_offsets: "
            f"{str(record)[:120]}: download it again"
        )
    if code not in DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {code}, which is not read: use a float32, float16 or "
            "bfloat16 checkpoint"
        )
    dtype, shape, (start, stop) = DTYPES[code], tuple(extents), offsets
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{file}: tensor {name!r} {list(shape)} {code} should be {math.prod(shape) * dtype.itemsize:,} "
            f"bytes, its range has {stop - start:,}: download it again"
        )
    return TensorEntry(file, dtype, flattened(shape), data + start, stop - start)


def flattened(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape as parameters have it: the taps of a convolution of single columns, [columns, 1, taps], are a
    vector.
    """
    return (shape[0] * shape[2],) if len(shape) == 3 and shape[1] == 1 else shape


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(file: Path, entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """Raise CheckpointError unless the tensors fill the file from byte `start` to its end, without gaps and
    overlaps, as safetensors demands.
    """
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if entry.offset != at:
            kind = "overlaps the tensor before it" if entry.offset < at else "leaves a gap before it"
            raise CheckpointError(
                f"{file}: tensor {name!r} at byte {entry.offset:,} {kind}, which ends at {at:,}: "
                "download it again"
            )
        at += entry.bytes
    if at > size:
        raise CheckpointError(
            f"{file}: truncated: its header lists tensors up to byte {at:,}, the file has {size:,} bytes "
            f"({at - size:,} missing): download or copy it again"
        )
    if at < size:
        raise CheckpointError(
            f"{file}: {size - at:,} bytes follow the last tensor, which ends at {at:,}: the file "
            "has changed since it was written; download it again"
        )
