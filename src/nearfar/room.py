"""Whether a disk has room for what is about to be written to it."""

from __future__ import annotations

import shutil
from pathlib import Path


def lacking(folder: Path, needed: int) -> str | None:
    """What is wrong where the disk of a folder, or of where it will be made, has fewer than `needed` bytes
    free; None where it has room, or cannot say.
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
    from nearfar.edge_runtime.artifact.budget import show_size  # which takes numpy

    return f"needs {show_size(needed)} at least, and the disk of {there} has {show_size(free)} free"
