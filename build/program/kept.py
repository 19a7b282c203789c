"""The kernel cache: compiled programs, kept across builds by fingerprint. A rebuild with the same shapes
compiles nothing.

A file is named after the fingerprint of a program, and holds the program's record and files with a digest of
them. It is written under a temporary name and renamed. A damaged or misplaced file is ignored and the program
is compiled again.

Object files of single kernels are kept, too, by the fingerprint of their TIR. LLVM takes most of a
compilation's time, models have kernels in common, and a change to the code that makes kernels leaves most of
them as they were: then a program is put together from kept object files.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nearfar.build.program.compiled import Compiled
from nearfar.build.program.fingerprint import fingerprint
from nearfar.errors import NearfarWarning
from nearfar.folders import cache_folder, read_cache, trim_cache, write_cache

FOLDER = "NEARFAR_KERNEL_CACHE"
"""The environment variable that names another folder for the cache."""
LIMIT = 1 << 30  # bytes; a program of a model of a billion parameters takes about one million
OBJECTS_LIMIT = 1 << 29  # bytes; the object file of a kernel takes some thousands
_SUFFIX = ".program"
_OBJECT = ".object"


class KernelCache:
    """The folder with a file for each program, no larger than `limit` bytes.

    Where the folder cannot be read or written (no permission, a full disk), programs are compiled and not
    kept; that gives a warning, no error.
    """

    def __init__(self, folder: Path | None = None, limit: int = LIMIT) -> None:
        given = os.environ.get(FOLDER)
        self.folder = folder or (Path(given) if given else cache_folder() / "kernels")
        self._limit = limit

    def get(self, key: str) -> Compiled | None:
        """Read the program of a fingerprint, None where there is none; the file counts as used now."""
        file = self._file(key)
        data = read_cache(file)
        found = Compiled.of_bytes(data, key) if data else None
        if found is not None:
            with contextlib.suppress(OSError):
                os.utime(file)
        return found

    def put(self, key: str, program: Compiled) -> None:
        """Keep a program, and delete the least recently used ones beyond the limit."""
        if not write_cache(self._file(key), program.to_bytes(key)):
            warnings.warn(
                f"compiled kernels cannot be kept in {self.folder}, so each build compiles them again: free "
                f"some space, or set {FOLDER} to another folder",
                NearfarWarning,
                stacklevel=2,
            )
        trim_cache(self.folder, _SUFFIX, self._limit, keep=self._file(key))

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"


@dataclass(frozen=True)
class ObjectCache:
    """The folder with a file for each object file of a kernel; a `nearfar.kernels.keep.Keep`."""

    folder: Path
    limit: int = OBJECTS_LIMIT

    @classmethod
    def beside(cls, programs: KernelCache) -> ObjectCache:
        """The object files that belong to a cache of programs."""
        return cls(programs.folder / "objects")

    def __call__(self, make: Callable[[], bytes], /, *decides: object) -> bytes:
        """See Keep. A damaged or misplaced file is made again; in a folder that cannot be
        written, every file is made each time.
        """
        key = fingerprint(*decides)
        file, mark = self.folder / f"{key}{_OBJECT}", bytes.fromhex(key)
        found = read_cache(file)
        if found.startswith(mark):
            with contextlib.suppress(OSError):
                os.utime(file)
            return zlib.decompress(found[len(mark) :])
        made = make()
        write_cache(file, mark + zlib.compress(made, 1))
        return made

    def trim(self) -> None:
        """Delete the least recently used object files beyond the limit."""
        trim_cache(self.folder, _OBJECT, self.limit)
