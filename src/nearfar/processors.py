"""Counts the processors that this process may use, within its container's CPU quota."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def processors() -> int:
    """The number of parallel jobs for work that gains from second threads of a core: compilers, hashes."""
    return within_quota(len(affinity()))


def within_quota(count: int) -> int:
    """Limit a number of threads to the container's quota: more threads get the whole process stopped for most
    of every tenth of a second, and each takes memory.
    """
    quota = cpu_quota()
    return max(1, count if quota is None else min(count, int(quota)))


def affinity() -> Collection[int]:
    """The processors that the system lets this process use, by number."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def cpu_quota(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> float | None:
    """CPUs that Linux lets this process use at once, on average: the least of its control groups. None: no
    limit.

    `membership` names the group in each hierarchy. A container may see another name there than its own, so
    the groups above count too, up to the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    quotas: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            quotas += _found(_unified(folder) for folder in _upwards(cgroups, path))
            quotas += _found(_unified(folder) for folder in _upwards(cgroups / "unified", path))
        elif "cpu" in controllers.split(","):
            for mounted in dict.fromkeys((controllers, "cpu", "cpu,cpuacct")):
                quotas += _found(_legacy(folder) for folder in _upwards(cgroups / mounted, path))
    return min(quotas, default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """The folder of a group and those above it, up to the root of the hierarchy."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _found(quotas: Iterator[float | None]) -> list[float]:
    return [quota for quota in quotas if quota is not None]


def _unified(folder: Path) -> float | None:
    """Read the quota of control groups v2: "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    return _ratio(*words_of(folder / "cpu.max", 2))


def _legacy(folder: Path) -> float | None:
    """Read the quota of control groups v1: quota and period in two files, -1 for no limit."""
    return _ratio(*words_of(folder / "cpu.cfs_quota_us", 1), *words_of(folder / "cpu.cfs_period_us", 1))


def words_of(file: Path, count: int) -> list[str]:
    """The first `count` words of a file; empty words where the file has fewer."""
    try:
        words = file.read_text().split()
    except (OSError, UnicodeDecodeError):
        words = []
    return [*words, *[""] * count][:count]


def _ratio(quota: str, period: str) -> float | None:
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) > 0 else None
