"""How many threads are worth starting: fast cores that this process may use, in its container's CPU time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from nearfar.children import child_environment

PROCESSORS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
ALIKE = 0.6
"""Of the highest speed: what is faster than this is worth a thread. Little cores are at 0.2 to 0.45; of the
big ones some clock higher than others.
"""


def usable_cores() -> int:
    """Physical cores this process may use: a second thread on a core waits for the same arithmetic units.

    Where cores differ in speed, the fast ones: a launch ends with its last task, and a slow core would take
    memory's time from them. No more than its container's quota: threads beyond it get the whole process
    stopped for most of every tenth of a second.
    """
    allowed = _affinity()
    count = len(allowed)
    fast = fast_cores(allowed)
    if fast:
        count = min(count, fast)
    else:
        with contextlib.suppress(ImportError):
            import psutil

            count = min(count, psutil.cpu_count(logical=False) or count)
    quota = cpu_quota()
    return max(1, count if quota is None else min(count, int(quota)))


def _affinity() -> Collection[int]:
    """The processors that the system lets this process use, by number."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def fast_cores(allowed: Collection[int], root: Path | None = None) -> int:
    """Physical cores among the processors `allowed` that are about as fast as the fastest; 0 where the system
    does not tell, or all are alike.

    Linux tells on hybrid processors: ARM's big and little cores by capacity, Intel's P and E cores by type,
    and others by their highest clock. macOS counts its performance cores itself.
    """
    if root is None and sys.platform == "darwin":
        return _darwin_fast_cores()
    here = root or PROCESSORS
    speeds = {cpu: _speed(here, cpu) for cpu in allowed}
    performance, efficient = (
        _listed(here.parent.parent / kind / "cpus") for kind in ("cpu_core", "cpu_atom")
    )
    if performance and efficient:
        speeds = {cpu: 2 if cpu in performance else 1 for cpu in allowed}
    best = max(speeds.values(), default=0)
    fast = [cpu for cpu, speed in speeds.items() if speed >= best * ALIKE]
    if 0 in speeds.values() or len(fast) == len(speeds):
        return 0
    return len({_core(here, cpu) for cpu in fast})


def _speed(root: Path, cpu: int) -> int:
    """The capacity of a processor (of 1024), or its highest clock in kHz; 0: not known."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        (word,) = _words(root / f"cpu{cpu}" / name, 1)
        if word.isdigit():
            return int(word)
    return 0


def _core(root: Path, cpu: int) -> frozenset[int]:
    """The processors that share a physical core with one."""
    return _listed(root / f"cpu{cpu}" / "topology" / "thread_siblings_list") or frozenset((cpu,))


def _listed(file: Path) -> frozenset[int]:
    """A list of processors as Linux writes it: "0-3,8"; empty where there is none."""
    found: set[int] = set()
    for part in _words(file, 1)[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _darwin_fast_cores() -> int:
    """Performance cores of Apple's processors; 0 on others."""
    command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
        said = done.stdout.strip()
        return int(said) if said.isdigit() else 0
    return 0


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
