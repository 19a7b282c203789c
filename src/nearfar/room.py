"""Checks whether a disk has room for files, and makes the error for a failed write."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from nearfar.errors import BuildError


def lacking(folder: Path, needed: int) -> str | None:
    """The message for a disk with fewer than `needed` free bytes, at a folder or where it will be made; None
    where it has room, or cannot say.
    """
    there = folder.expanduser().resolve()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        return None
    if free >= needed:
        return None
    from nearfar.edge_runtime.artifact.budget import show_size  # late, because the module imports NumPy

    return f"needs {show_size(needed)} at least, and the disk of {there} has {show_size(free)} free"


def disk_error(error: OSError, directory: Path, what: str, needed: int) -> BuildError:
    """Make the BuildError for a failed write: with the disk's free bytes where it is full, else with the
    system's message.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = shutil.disk_usage(directory).free
        except OSError:
            free = 0
        return BuildError(
            f"the disk of {directory} is full: writing {what} needs {needed:,} more bytes at least, {free:,} "
            "are free: free some space or choose another output directory"
        )
    place = what if Path(what).is_absolute() else f"{what} under {directory}"
    return BuildError(f"cannot write {place}: {error.strerror or error}: check permissions and the disk")
