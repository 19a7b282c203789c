"""Counts the processors that this process may use, within its container's CPU quota."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from nearfar.control_groups import CGROUPS, MEMBERSHIP, control_groups, words_of


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
    """
    groups = control_groups("cpu", membership, cgroups, ("cpu,cpuacct",))
    quotas = [*map(_unified, groups.unified), *map(_legacy, groups.legacy)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _unified(folder: Path) -> float | None:
    """Read the quota of control groups v2: "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    return _ratio(*words_of(folder / "cpu.max", 2))


def _legacy(folder: Path) -> float | None:
    """Read the quota of control groups v1: quota and period in two files, -1 for no limit."""
    return _ratio(*words_of(folder / "cpu.cfs_quota_us", 1), *words_of(folder / "cpu.cfs_period_us", 1))


def _ratio(quota: str, period: str) -> float | None:
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) > 0 else None
