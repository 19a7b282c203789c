"""Counts the memory that this process may use: the machine's, within its container's limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from nearfar.control_groups import CGROUPS, MEMBERSHIP, control_groups, words_of


@dataclass(frozen=True)
class HostMemory:
    """Bytes of memory: in all, and what can be had now without swapping, cached files given up."""

    total: int
    available: int


def host_memory(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> HostMemory:
    """The machine's memory, or less where control groups limit this process: Linux ends a process that takes
    more than its group may have.
    """
    machine = psutil.virtual_memory()
    limits = [HostMemory(machine.total, machine.available), *_limits(membership, cgroups)]
    return HostMemory(min(limit.total for limit in limits), min(limit.available for limit in limits))


def _limits(membership: Path, cgroups: Path) -> Iterator[HostMemory]:
    """The limits of the control groups; groups without one are left out."""
    groups = control_groups("memory", membership, cgroups)
    for folder in groups.unified:
        yield from _limit(folder, ("memory.max", "memory.high"), "memory.current", "")
    for folder in groups.legacy:
        yield from _limit(folder, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def _limit(folder: Path, limits: tuple[str, ...], usage: str, prefix: str) -> Iterator[HostMemory]:
    """The limit of a group, by the names of its files. `prefix`: of the counters in memory.stat that include
    the groups below.
    """
    found = [word for name in limits for word in words_of(folder / name, 1) if word.isdigit()]
    (used,) = words_of(folder / usage, 1)
    if found and used.isdigit():
        total = min(map(int, found))
        yield HostMemory(total, max(total - max(int(used) - _cached(folder, prefix), 0), 0))


def _cached(folder: Path, prefix: str) -> int:
    """Bytes of cached files, which the system gives up when the group needs memory."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    counters = dict(words for words in map(str.split, lines) if len(words) == 2)
    values = [counters.get(f"{prefix}{kind}_file", "") for kind in ("active", "inactive")]
    return sum(int(value) for value in values if value.isdigit())
