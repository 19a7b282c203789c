"""The file of a snapshot: safetensors, with a checksum over every byte (docs/snapshots.md).

It is read and written without a library: a writer that streams notices a full disk and Ctrl-C at once, and
devices need no further package.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from nearfar.errors import SnapshotError

Array = npt.NDArray[np.generic]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, possibly from another thread."""

FORMAT, VERSION = "nearfar-snapshot", 2
DTYPES = {"I32": "<i4", "U32": "<u4", "F16": "<f2", "F32": "<f4"}
PIECE_BYTES = 4 << 20  # bytes read or written, and hashed, at a time
HEADER_LIMIT = 100_000_000  # the limit of the safetensors library
MOST_AXES = 8
_CODES = {np.dtype(name): code for code, name in DTYPES.items()}
_START = f'{{"__metadata__":{{"format":"{FORMAT}","version":"'.encode()
_UNSIGNED = "0" * 64  # placeholder of the checksum while it is computed


class _Stopped(Exception):
    """The caller stopped the writer."""


def is_snapshot(path: Path) -> bool:
    """Whether the file begins as a snapshot of any version."""
    try:
        with path.open("rb") as file:
            return file.read(8 + len(_START))[8:] == _START
    except OSError:
        return False


def check_target(path: Path, force: bool) -> None:
    """Raise SnapshotError if a snapshot must not or cannot be written to `path`."""
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "not an ordinary file"
        raise SnapshotError(f"{path} is {what}: name a file for the snapshot")
    if path.exists() and not force and not is_snapshot(path):
        raise SnapshotError(
            f"{path} exists and is not a snapshot, so it is not overwritten: choose another name, or "
            "force it (--force)"
        )
    if not path.parent.is_dir():
        raise SnapshotError(f"cannot write {path}: the directory {path.parent} does not exist; make it first")


def write(
    path: Path,
    metadata: Mapping[str, str],
    tensors: Mapping[str, Array],
    *,
    force: bool = False,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Write a snapshot that appears whole or not at all: to a file next to `path`, flushed to the disk, then
    renamed.

    `metadata` is added to format and version. `stop`, once set, ends the writing early; then, or after an
    error, no file is left.
    """
    check_target(path, force)
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            _write(file, metadata, tensors, progress, stop)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise SnapshotError(_reason(path, tensors, error)) from error
    except _Stopped:
        pass
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def read(path: Path, progress: Progress | None = None) -> tuple[dict[str, str], dict[str, Array]]:
    """Read metadata and tensors of a snapshot of this version; SnapshotError if any byte has changed since it
    was written.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file, progress)
    except OSError as error:
        raise SnapshotError(f"cannot read the snapshot {path}: {error.strerror or error}") from error


def _write(
    file: BinaryIO,
    metadata: Mapping[str, str],
    tensors: Mapping[str, Array],
    progress: Progress | None,
    stop: threading.Event | None,
) -> None:
    fields = {"format": FORMAT, "version": str(VERSION), "sha256": _UNSIGNED, **metadata}
    header: dict[str, Any] = {"__metadata__": fields}
    end = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _CODES[array.dtype],
            "shape": array.shape,
            "data_offsets": (end, end + array.nbytes),
        }
        end += array.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(head)
    file.write(head)
    done = 0
    for array in tensors.values():
        for piece in _pieces(np.ascontiguousarray(array)):
            if stop is not None and stop.is_set():
                raise _Stopped
            file.write(piece)
            digest.update(piece)
            done += len(piece)
            if progress is not None:
                progress(done, end)
    file.seek(head.index(_UNSIGNED.encode()))
    file.write(digest.hexdigest().encode())


def _pieces(array: Array) -> Iterator[memoryview]:
    raw = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(raw), PIECE_BYTES):
        yield raw[start : start + PIECE_BYTES]


def _read(path: Path, file: BinaryIO, progress: Progress | None) -> tuple[dict[str, str], dict[str, Array]]:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8 + len(_START))
    length = int.from_bytes(start[:8], "little")
    if start[8:] != _START[: max(len(start) - 8, 0)] or length > HEADER_LIMIT:
        raise SnapshotError(f"{path} is not a snapshot of nearfar. Make one with nearfar cache save")
    if 8 + length > size:
        raise SnapshotError(
            f"the snapshot {path} is truncated: {size:,} bytes do not even hold its header. {_AGAIN}"
        )
    head = start + file.read(8 + length - len(start))
    header = _parse(path, head[8:])
    metadata = header.pop("__metadata__")
    expected = 8 + length + _check_layout(path, header)
    if size != expected:
        verb = "is truncated" if size < expected else "has bytes beyond its end"
        raise SnapshotError(f"the snapshot {path} {verb}: {size:,} bytes, not {expected:,}. {_AGAIN}")
    signature = metadata["sha256"].encode()
    digest = hashlib.sha256(
        head.replace(b'"sha256":"' + signature + b'"', f'"sha256":"{_UNSIGNED}"'.encode())
    )
    body = _read_body(file, expected - 8 - length, digest.update, progress)
    if digest.hexdigest().encode() != signature:
        raise SnapshotError(
            f"the snapshot {path} is damaged: SHA-256 {digest.hexdigest()}, it was written with "
            f"{signature.decode()}. {_AGAIN}"
        )
    tensors = {
        name: body[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
    return metadata, tensors


_AGAIN = "Copy it again, or save it again with nearfar cache save"


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """The header, checked to be of this version."""
    found = text[len(_START) :].partition(b'"')[0]
    if re.fullmatch(rb"\d{1,9}", found) and int(found) > VERSION:
        raise SnapshotError(
            f"{path} is a snapshot of version {int(found)}, newer than this nearfar understands ({VERSION}). "
            "Upgrade nearfar (pip install -U nearfar), or save the snapshot again with this version"
        )
    if re.fullmatch(rb"\d{1,9}", found) and int(found) < VERSION:
        raise SnapshotError(
            f"{path} is a snapshot of version {int(found)}, which an earlier nearfar wrote; this one reads "
            f"version {VERSION}. Save it again with nearfar cache save"
        )
    try:
        header = json.loads(text)
        metadata = header["__metadata__"]
        signature = metadata["sha256"]
        fine = metadata["version"] == str(VERSION) and text.count(f'"sha256":"{signature}"'.encode()) == 1
        fine = fine and len(signature) == 64 and all(isinstance(value, str) for value in metadata.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        fine = False
    if not fine:
        raise SnapshotError(f"the snapshot {path} is damaged: its header cannot be read. {_AGAIN}")
    return dict(header)


def _check_layout(path: Path, header: Mapping[str, Any]) -> int:
    """Bytes of all tensors, checked to follow each other without gaps."""
    end = 0
    try:
        for entry in header.values():
            shape, offsets = entry["shape"], entry["data_offsets"]
            count = math.prod(shape) * np.dtype(DTYPES[entry["dtype"]]).itemsize
            if (
                not all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, *offsets))
                or len(shape) > MOST_AXES
            ):
                raise ValueError
            if offsets != [end, end + count]:
                raise ValueError
            end += count
    except (ValueError, LookupError, TypeError):
        raise SnapshotError(
            f"the snapshot {path} is damaged: its header does not describe its tensors. {_AGAIN}"
        ) from None
    return end


def _read_body(
    file: BinaryIO, count: int, update: Callable[[memoryview], None], progress: Progress | None
) -> npt.NDArray[np.uint8]:
    body = np.empty(count, np.uint8)
    done = 0
    while done < count:
        piece = body.data[done : done + PIECE_BYTES]
        got = file.readinto(piece)  # type: ignore[attr-defined]
        if not got:
            raise OSError("the file became shorter while it was read")
        update(piece[:got])
        done += got
        if progress is not None:
            progress(done, count)
    return body


def _reason(path: Path, tensors: Mapping[str, Array], error: OSError) -> str:
    needed = sum(array.nbytes for array in tensors.values())
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        free = 0
    return (
        f"cannot write the snapshot {path}: {error.strerror or error}; it takes {needed:,} bytes, {free:,} "
        "are free there. Free some space, or choose another directory"
    )


def _sync_directory(path: Path) -> None:
    """Flush a renaming to the disk, if the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
