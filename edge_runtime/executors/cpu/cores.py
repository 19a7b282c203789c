"""How many threads are worth starting: fast cores that this process may use, in its container's CPU time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from nearfar.children import child_environment
from nearfar.processors import affinity, within_quota, words_of

PROCESSORS = Path("/sys/devices/system/cpu")
ALIKE = 0.6
"""Share of the highest speed: a core that is faster is worth a thread. Little cores are at 0.2 to 0.45; some
big cores clock higher than others.
"""


def usable_cores() -> int:
    """Physical cores this process may use: a second thread on a core waits for the same arithmetic units.

    Where cores differ in speed, the fast ones: a launch ends with its last task, and a slow core would take
    memory's time from them. No more than its container's quota.
    """
    allowed = affinity()
    count = len(allowed)
    fast = fast_cores(allowed)
    if fast:
        count = min(count, fast)
    else:
        with contextlib.suppress(ImportError):
            import psutil

            count = min(count, psutil.cpu_count(logical=False) or count)
    return within_quota(count)


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
        (word,) = words_of(root / f"cpu{cpu}" / name, 1)
        if word.isdigit():
            return int(word)
    return 0


def _core(root: Path, cpu: int) -> frozenset[int]:
    """The processors that share a physical core with one."""
    return _listed(root / f"cpu{cpu}" / "topology" / "thread_siblings_list") or frozenset((cpu,))


def _listed(file: Path) -> frozenset[int]:
    """A list of processors as Linux writes it: "0-3,8"; empty where there is none."""
    found: set[int] = set()
    for part in words_of(file, 1)[0].split(","):
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
