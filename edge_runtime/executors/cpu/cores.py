"""The number of threads worth starting: fast cores that this process may use, within the container's CPU
quota.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from nearfar.children import child_environment
from nearfar.control_groups import words_of
from nearfar.processors import affinity, within_quota

PROCESSORS = Path("/sys/devices/system/cpu")
ALIKE = 0.6
"""The share of the highest speed above which a core is worth a thread.

Little cores are at 0.2 to 0.45; some big cores have a higher clock than others.
"""


def usable_cores() -> int:
    """The number of physical cores that this process may use, at most the container's quota.

    A second thread on a core would wait for the same arithmetic units. If cores differ in speed, only the
    fast ones count: a launch ends with its last task, and slow cores would take memory bandwidth from the
    others.
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
    """The number of physical cores among `allowed` processors that are about as fast as the fastest one.

    0 if the system does not tell, or if all are alike. On hybrid processors Linux tells: the capacity of
    ARM's big and little cores, the type of Intel's P and E cores, and for others the highest clock. macOS
    counts its performance cores itself.
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
    """The capacity of a processor (of 1024), or its highest clock in kHz; 0 if neither is known."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        (word,) = words_of(root / f"cpu{cpu}" / name, 1)
        if word.isdigit():
            return int(word)
    return 0


def _core(root: Path, cpu: int) -> frozenset[int]:
    """The processors on the same physical core."""
    return _listed(root / f"cpu{cpu}" / "topology" / "thread_siblings_list") or frozenset((cpu,))


def _listed(file: Path) -> frozenset[int]:
    """Parse a list of processors in Linux's form, "0-3,8"; empty if there is no file."""
    found: set[int] = set()
    for part in words_of(file, 1)[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _darwin_fast_cores() -> int:
    """The number of performance cores of an Apple processor; 0 on others."""
    command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
        said = done.stdout.strip()
        return int(said) if said.isdigit() else 0
    return 0
