"""Where this user's files of nearfar lie: what may be deleted at any time, and what may not."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

DIGEST_BYTES = 32
_ABANDONED = 3600  # seconds after which nobody is writing a file any more
HOME = "NEARFAR_HOME"
"""The environment's variable for a folder that everything lies in instead."""


def cache_folder() -> Path:
    """For what can be made again."""
    if given := os.environ.get(HOME):
        return Path(given).expanduser() / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "nearfar"
    return _local("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """For what is to stay."""
    if given := os.environ.get(HOME):
        return Path(given).expanduser() / "data"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "nearfar"
    return _local("XDG_DATA_HOME", ".local/share")


def read_cache(file: Path) -> bytes:
    """What `write_cache` wrote; empty where there is nothing, or it is damaged: drivers check little of
    what they are given.
    """
    try:
        data = file.read_bytes()
    except OSError:
        return b""
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else b""


def write_cache(file: Path, content: bytes) -> bool:
    """Write a file with its digest. Gives whether that was possible: a disk that is full or read-only is no
    error.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, hashlib.sha256(content).digest() + content)
        return True
    return False


def write_whole(file: Path, content: bytes) -> None:
    """Write a file so that it is there whole or stays as it was, whatever becomes of this process, and is
    its owner's alone to read: beside it, then renamed. OSError where it cannot be written.
    """
    handle, aside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        Path(aside).replace(file)
    except BaseException:  # Ctrl-C leaves nothing either
        Path(aside).unlink(missing_ok=True)
        raise


def trim_cache(folder: Path, suffix: str, most: int, keep: Path) -> None:
    """Remove those of the files with a suffix that were not used (by their time) for longest, until all have
    at most so many bytes together, but not `keep`; and what a writer left half-written long ago.

    Other processes may do the same, and files may go meanwhile; what cannot be removed is no error.
    """
    there: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                state = entry.stat()
                there.append((state.st_mtime, state.st_size, Path(entry.path)))
    whole = sorted(each for each in there if each[2].suffix == suffix)
    old = time.time() - _ABANDONED
    given_up = [path for used, _, path in there if path.suffix != suffix and used < old]
    over = sum(size for _, size, _ in whole) - most
    for _, size, path in whole:
        if over > 0 and path != keep:
            given_up.append(path)
            over -= size
    for path in given_up:
        with contextlib.suppress(OSError):
            path.unlink()


def _local(variable: str, below_home: str) -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "nearfar"
    return Path(os.environ.get(variable) or Path.home() / below_home) / "nearfar"
