"""What the executors of plans share: weights in host memory, buffers by name and group, the tables of rotations."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.errors import ArtifactError, DeviceError
from nearfar.format.buffers import CONTEXT, keys, values
from nearfar.format.buffers import pages as pages_of

Array = npt.NDArray[np.generic]


def reserve(count: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory at a page border, in huge pages where the system has them.

    Weights are read once a token from end to end; with 4 KiB pages the address translation alone costs several percent.
    """
    try:
        area = mmap.mmap(-1, max(count, 1))
    except (OSError, OverflowError) as error:
        raise DeviceError(f"there is no memory for {count:,} bytes: give the cache less (--kv-memory), or take a smaller model") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8, count)  # keeps the mapping alive


def load_weights(directory: Path, weights: Mapping[str, Any]) -> tuple[dict[str, Array], npt.NDArray[np.uint8]]:
    """All tensors, as views into one copy of the weight stream, and that copy; checksums are the artifact loader's affair."""
    stream = reserve(int(weights["bytes"]))
    at = 0
    for shard in weights["shards"]:
        part = memoryview(stream.data)[at : at + int(shard["bytes"])]
        got = 0
        try:
            with (directory / shard["file"]).open("rb", buffering=0) as file:
                while got < len(part) and (count := file.readinto(part[got:])):
                    got += count
        except OSError as error:
            reason = error.strerror or str(error)
            raise ArtifactError(f"{directory / shard['file']} cannot be read: {reason}. Copy or build the artifact again") from error
        if got != int(shard["bytes"]):
            raise ArtifactError(f"{shard['file']} has {got} bytes, the manifest says {shard['bytes']}: copy or build the artifact again")
        at += got
    tensors = {}
    for record in weights["tensors"]:
        start, end = int(record["offset"]), int(record["offset"]) + int(record["bytes"])
        try:
            if not 0 <= start <= end <= len(stream):
                raise ValueError(f"bytes {start} to {end} are not in {len(stream)}")
            tensors[str(record["name"])] = stream[start:end].view(record["dtype"]).reshape(record["shape"])
        except (ValueError, TypeError) as error:
            raise ArtifactError(
                f"the tensor {record['name']} is not {record['dtype']}{record['shape']} in the weights of {directory} ({error}): "
                "build the artifact again"
            ) from error
    return tensors, stream


def check_pages(content: Mapping[str, Array], expected: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
    """ValueError where what is to be written to pages has other names, shapes or dtypes than the cache."""
    given = {name: (array.shape, array.dtype) for name, array in content.items()}
    if given != dict(expected):
        wrong = sorted(name for name in {*given, *expected} if given.get(name) != expected.get(name))
        raise ValueError(f"pages do not fit the cache: {wrong[0]} is {given.get(wrong[0])}, not {expected.get(wrong[0])}")


def rope_table(inv_freq: Array, scale: float, context: int) -> npt.NDArray[np.float32]:
    """Cosines, then sines, of every position, float32 [context, head_dim]: docs/artifact.md's `rope.<name>` buffers.

    `scale` applies to what turns: a frequency of 0 leaves a pair as it is.
    """
    angle = np.arange(context, dtype=np.float64)[:, None] * inv_freq.astype(np.float64)
    factor = np.where(inv_freq == 0, 1.0, scale)
    return np.concatenate([np.cos(angle) * factor, np.sin(angle) * factor], axis=1).astype(np.float32)


def symbols(pages: Sequence[int], context: int) -> dict[str, int]:
    """What the extents of buffers stand for, where each group has so many pages."""
    return {CONTEXT: context, **{pages_of(group): count for group, count in enumerate(pages)}}


def cache_names(groups: Sequence[int], group: int) -> list[str]:
    """The buffers of keys and values of a group; `groups`: by cache."""
    caches = [cache for cache, of in enumerate(groups) if of == group]
    return [name for cache in caches for name in (keys(cache), values(cache))]


def place(buffer: str, shape: tuple[int, ...], dtype: np.dtype[Any], data: Array, row: int, column: int) -> int:
    """The element of a buffer at which what is written begins (see Executor.write); ValueError where it does not fit."""
    part = data.ndim == len(shape) == 2 and len(data) == 1 and 0 <= column <= shape[1] - data.shape[1]
    whole = column == 0 and data.shape[1:] == shape[1:]
    if data.dtype != dtype or not (part or whole) or not 0 <= row <= shape[0] - len(data):
        at = f"row {row}, column {column}" if column else f"row {row}"
        raise ValueError(f"{data.dtype}{list(data.shape)} at {at} does not fit {buffer}, {dtype}{list(shape)}")
    return row * math.prod(shape[1:]) + column
