"""Compiled programs, kept across builds by what they were compiled from: a rebuild of the same shapes
compiles nothing.

A file is named after the fingerprint of a program, and holds the program's record and files. It is written
aside and renamed, with a digest of itself: one that is damaged, or that another program's was put in place
of, is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from nearfar import strict_json
from nearfar.edge_runtime.artifact.folders import cache_folder, read_cache, trim_cache, write_cache
from nearfar.format.manifest import Program, plain, record

FOLDER = "NEARFAR_KERNEL_CACHE"
"""The environment's variable that names another folder."""
LIMIT = 1 << 30  # bytes; a program of a model of a billion parameters takes about one million
_SUFFIX = ".program"
_HEADER = 8  # bytes that say how long the record is


@dataclass(frozen=True)
class Compiled:
    """A program as it lies in an artifact: its record, and its files by their paths there."""

    record: Program
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, record: Program, root: Path) -> Compiled:
        """With all files below `root`, which are this program's alone."""
        found = sorted(path for path in root.rglob("*") if path.is_file())
        return cls(record, {path.relative_to(root).as_posix(): path.read_bytes() for path in found})

    def write(self, root: Path) -> None:
        """Write the files below `root`."""
        for name, data in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def to_bytes(self, key: str) -> bytes:
        """All of it under a key; `of_bytes` reads it."""
        sizes = {name: len(data) for name, data in self.files.items()}
        header = json.dumps({"key": key, "record": plain(self.record), "files": sizes}).encode()
        whole = b"".join([len(header).to_bytes(_HEADER, "little"), header, *self.files.values()])
        return zlib.compress(whole, 1)

    @classmethod
    def of_bytes(cls, data: bytes, key: str) -> Compiled | None:
        """What `to_bytes` made of it under this key; None where the bytes are anything else."""
        try:
            whole = zlib.decompress(data)
            start = _HEADER + int.from_bytes(whole[:_HEADER], "little")
            header = strict_json.loads(whole[_HEADER:start])
            files: dict[str, bytes] = {}
            for name, size in header["files"].items():
                files[_inside(name)] = whole[start : start + size]
                start += size
            if header["key"] != key or start != len(whole):
                return None
            return cls(cast(Program, record(Program, header["record"])), files)
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError):
            return None


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name} is not below an artifact")
    return name


class KernelCache:
    """The folder with a file for each program, no larger than `limit` bytes.

    What cannot be read or written (no right to, a disk that is full) is compiled and not kept, and no error.
    """

    def __init__(self, folder: Path | None = None, limit: int = LIMIT) -> None:
        given = os.environ.get(FOLDER)
        self.folder = folder or (Path(given) if given else cache_folder() / "kernels")
        self._limit = limit

    def get(self, key: str) -> Compiled | None:
        """What is kept under a fingerprint; it counts as used now."""
        file = self._file(key)
        data = read_cache(file)
        found = Compiled.of_bytes(data, key) if data else None
        if found is not None:
            with contextlib.suppress(OSError):
                os.utime(file)
        return found

    def put(self, key: str, program: Compiled) -> None:
        """Keep a program, and give up those unused for longest where that is too much."""
        write_cache(self._file(key), program.to_bytes(key))
        trim_cache(self.folder, _SUFFIX, self._limit, keep=self._file(key))

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"
