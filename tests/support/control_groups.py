"""Makes control groups of Linux that limit the memory of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
"""Where a control group is made, and the file with its limit: of Linux's first and second version."""


@contextmanager
def control_group(limit: int) -> Iterator[Path | None]:
    """A control group whose processes have `limit` bytes of memory; None where none can be made, which needs
    root on Linux.
    """
    for root, name in GROUPS:
        group = root / f"nearfar-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                (group / name).write_text(str(limit))
                yield group
                return
        finally:
            group.rmdir()
    yield None
