"""Compiled programs, kept across builds by what they were compiled from: a rebuild of the same shapes
compiles nothing.

A file is named after the fingerprint of a program, and holds the program's record and files. It is written
aside and renamed, with a digest of itself: one that is damaged, or that another program's was put in place
of, is as good as none.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

from nearfar.build.program.compiled import Compiled
from nearfar.errors import NearfarWarning
from nearfar.folders import cache_folder, read_cache, trim_cache, write_cache

FOLDER = "NEARFAR_KERNEL_CACHE"
"""The environment's variable that names another folder."""
LIMIT = 1 << 30  # bytes; a program of a model of a billion parameters takes about one million
_SUFFIX = ".program"


class KernelCache:
    """The folder with a file for each program, no larger than `limit` bytes.

    What cannot be read or written (no right to, a disk that is full) is compiled and not kept: a warning, and
    no error.
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
        if not write_cache(self._file(key), program.to_bytes(key)):
            warnings.warn(
                f"compiled kernels cannot be kept in {self.folder}, so each build compiles them anew: free "
                f"some space, or let {FOLDER} name another folder",
                NearfarWarning,
                stacklevel=2,
            )
        trim_cache(self.folder, _SUFFIX, self._limit, keep=self._file(key))

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"
