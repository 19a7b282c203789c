"""Allocates host memory in huge pages, and maps files that are larger than memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nearfar.errors import ArtifactError, DeviceError
from nearfar.memory import host_memory

MAPS = sys.platform == "linux"
FIXED = 0x10  # MAP_FIXED of Linux


def fits(count: int) -> bool:
    """Whether `count` bytes are free, by what the system says; otherwise files of that size are mapped."""
    return count <= host_memory().available


def mapped(files: Sequence[tuple[Path, int]], apart: int) -> npt.NDArray[np.uint8]:
    """Map the first bytes of files, read-only, at addresses that are `apart` bytes apart: a page is read when
    it is used first, and the system may drop it again. `files`: paths, each with its number of bytes.

    ArtifactError if a file is shorter; DeviceError if the system does not map it.
    """
    count = (len(files) - 1) * apart + files[-1][1]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    area = np.frombuffer(mmap.mmap(-1, count, flags=flags), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for index, (path, size) in enumerate(files):
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < size:
                raise ArtifactError(f"{path} is truncated. Copy the artifact again, or build it again")
            at = area.ctypes.data + index * apart
            found = libc.mmap(at, size, mmap.PROT_READ, mmap.MAP_PRIVATE | FIXED, file.fileno(), 0)
        if found != at:
            raise DeviceError(f"{path} cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return area


def reserve(count: int, *, whole: bool = False) -> npt.NDArray[np.uint8]:
    """Allocate `count` zeroed bytes at a page border. DeviceError if there is no memory.

    `whole`: all of it will be used, so it may lie in huge pages, where the system has them. Each token reads
    all weights from end to end; with 4 KiB pages the address translation alone costs 4 percent. By default
    Linux gives huge pages only to private memory.
    """
    try:
        if whole and hasattr(mmap, "MAP_PRIVATE"):
            area = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            area = mmap.mmap(-1, max(count, 1))
    except (OSError, OverflowError) as error:
        raise DeviceError(
            f"there is no memory for {count:,} bytes: give the cache less (--kv-memory), or take a smaller "
            "model"
        ) from error
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel may lack transparent huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8, count)  # the array keeps the mapping alive
