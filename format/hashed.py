"""Writes an artifact's files one after another, and hashes each while it is written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from nearfar.format.manifest import File
from nearfar.room import disk_error


class HashedFiles:
    """Writes files below a folder; at most one is open at a time.

    `files`: records of the complete files. `name`: the path of the last file begun, relative to the folder.
    Use it as a context manager: an exception closes the open file.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[File] = []
        self._file: BinaryIO | None = None
        self.name = ""
        self._written = 0
        self._digest = hashlib.sha256()

    @property
    def is_open(self) -> bool:
        """Whether a file has been begun and not ended."""
        return self._file is not None

    def begin(self, name: str) -> None:
        """Open a file by its path in the artifact; BuildError if the disk refuses it."""
        path = self.root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
        except OSError as error:
            raise disk_error(error, self.root, name, 0) from error
        self.name, self._written, self._digest = name, 0, hashlib.sha256()

    def put(self, data: bytes | memoryview[Any], what: str, left: int) -> None:
        """Append bytes to the open file; BuildError if the disk refuses them.

        `what` names the data in the error, `left` is the number of bytes still to be written.
        """
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            raise disk_error(error, self.root, what, left) from error
        self._digest.update(data)
        self._written += memoryview(data).nbytes

    def end(self) -> None:
        """Close the open file, if there is one, after flushing it to disk, and add its record."""
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise disk_error(error, self.root, self.name, 0) from error
        self._file = None
        self.files.append(File(self.name, self._written, self._digest.hexdigest()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
