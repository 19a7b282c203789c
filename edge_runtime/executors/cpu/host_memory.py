"""Allocates host memory in huge pages."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from nearfar.errors import DeviceError


def reserve(count: int) -> npt.NDArray[np.uint8]:
    """Allocate `count` zeroed bytes at a page border, in huge pages if the system has them.

    Each token reads all weights from end to end; with 4 KiB pages the address translation alone costs several
    percent. DeviceError if there is no memory.
    """
    try:
        area = mmap.mmap(-1, max(count, 1))
    except (OSError, OverflowError) as error:
        raise DeviceError(
            f"there is no memory for {count:,} bytes: give the cache less (--kv-memory), or take a smaller "
            "model"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel may lack transparent huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8, count)  # the array keeps the mapping alive
