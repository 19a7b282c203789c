"""The folders of this user's nearfar files: a cache that may be deleted at any time, and data."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

DIGEST_BYTES = 32
_ABANDONED = 3600  # seconds after which a half-written file counts as abandoned
HOME = "NEARFAR_HOME"
"""The environment variable that names one folder for all files."""


def cache_folder() -> Path:
    """The folder for files that can be made again."""
    if given := os.environ.get(HOME):
        return Path(given).expanduser() / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "nearfar"
    return _local("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """The folder for files that must be kept."""
    if given := os.environ.get(HOME):
        return Path(given).expanduser() / "data"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "nearfar"
    return _local("XDG_DATA_HOME", ".local/share")


def read_cache(file: Path) -> bytes:
    """Read a file of `write_cache`; empty for a missing or damaged file. Drivers check little of the data
    that they get, so damage must be detected here.
    """
    try:
        data = file.read_bytes()
    except OSError:
        return b""
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else b""


def write_cache(file: Path, content: bytes) -> bool:
    """Write a file with its digest. Returns whether that worked: a full or read-only disk is not an error."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, hashlib.sha256(content).digest() + content)
        return True
    return False


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically, readable by its owner alone: under another name, then renamed. If the process
    dies, the old file stays. Raises OSError where it cannot be written.
    """
    handle, aside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        Path(aside).replace(file)
    except BaseException:  # nothing is left behind, also after Ctrl-C
        Path(aside).unlink(missing_ok=True)
        raise


def trim_cache(folder: Path, suffix: str, most: int, keep: Path | None = None) -> None:
    """Remove the least recently used files with a suffix (by their time) until all take at most `most` bytes,
    but never `keep`; also remove abandoned half-written files.

    Other processes may do the same, and files may disappear meanwhile; a file that cannot be removed is not
    an error.
    """
    there: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir():
                    continue
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
