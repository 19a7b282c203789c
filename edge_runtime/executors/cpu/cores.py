"""How many threads are worth starting: cores that this process may use, within its container's CPU time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Physical cores this process may use: a second thread on a core waits for the same arithmetic units.

    No more than its container's quota: threads beyond it get the whole process stopped for most of every
    tenth of a second.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    if quota is not None:
        allowed = min(allowed, int(quota))
    try:
        import psutil

        return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
    except ImportError:
        return max(1, allowed)


def cpu_quota(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> float | None:
    """CPUs that Linux lets this process use at once, on average: the least of its groups. None: no limit.

    `membership` names the group of each hierarchy; a container may not see its own name there as the host
    gives it, so the groups above count too, up to the root.
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
    """Control groups v2: "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    return _ratio(*_words(folder / "cpu.max", 2))


def _legacy(folder: Path) -> float | None:
    """Control groups v1: the same in two files, -1 for no limit."""
    return _ratio(*_words(folder / "cpu.cfs_quota_us", 1), *_words(folder / "cpu.cfs_period_us", 1))


def _words(file: Path, count: int) -> list[str]:
    """So many words of a file, empty ones where it has fewer."""
    try:
        words = file.read_text().split()
    except (OSError, UnicodeDecodeError):
        words = []
    return [*words, *[""] * count][:count]


def _ratio(quota: str, period: str) -> float | None:
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) > 0 else None
