"""The number of CPU threads: from affinity, physical cores, and the container's quota."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nearfar.edge_runtime.executors.cpu.cores import fast_cores, usable_cores
from nearfar.processors import cpu_quota, processors
from tests.support.paths import ROOT


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V1 = "5:cpuset:/\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/pod/app", {"pod/app/cpu.max": "max 100000", "pod/cpu.max": "150000 100000"}, 1.5),
        ("0::/pod/app", {"pod/app/cpu.max": "300000 100000", "pod/cpu.max": "400000 100000"}, 3.0),
        ("0::/host/name/of/it", {"cpu.max": "100000 50000"}, 2.0),
        ("0::/../../outside", {"cpu.max": "100000 100000"}, 1.0),
        (
            V1,
            {
                "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
                "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "100000"}, None),
        ("0::/", {"cpu.max": "nonsense"}, None),
        ("0::/", {"cpu.max": "100000 0"}, None),
        ("", {}, None),
        ("no colons", {}, None),
    ],
)
def test_the_quota_is_the_least_of_the_groups(
    tmp_path: Path, membership: str, files: dict[str, str], expected: float | None
) -> None:
    write(tmp_path, {"self": membership, **{f"cgroup/{name}": text for name, text in files.items()}})
    assert cpu_quota(tmp_path / "self", tmp_path / "cgroup") == expected


def test_where_nothing_is_told_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "absent", tmp_path) is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (64.0, 8), (2.0, 2), (2.9, 2), (0.3, 1)])
def test_threads_stay_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr("nearfar.edge_runtime.executors.cpu.cores.fast_cores", lambda allowed: 0)
    monkeypatch.setattr("nearfar.processors.cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 16)
    assert usable_cores() == expected
    monkeypatch.setattr("nearfar.edge_runtime.executors.cpu.cores.fast_cores", lambda allowed: 4)
    assert usable_cores() == min(expected, 4)
    assert processors() == expected


def test_nobody_counts_processors_but_these() -> None:
    """os.cpu_count counts the whole machine, also in a container with a part of it: that would give memory
    and threads for 64 CPUs.
    """
    told = re.compile(r"cpu_count\(")
    parts = (ROOT / name for name in ("src/nearfar", "step", "format", "build", "targets", "edge_runtime",
                                      "remote", "fallback_server", "routing"))  # fmt: skip
    found = {path for part in parts for path in part.rglob("*.py") if told.search(path.read_text())}
    counts = ("src/nearfar/processors.py", "edge_runtime/executors/cpu/cores.py")
    shows = "edge_runtime/executors/cpu/__init__.py"  # `nearfar devices` shows the machine
    assert {str(path.relative_to(ROOT)) for path in found} == {*counts, shows}


def capacities(*values: int) -> dict[str, str]:
    return {f"system/cpu/cpu{i}/cpu_capacity": f"{value}\n" for i, value in enumerate(values)}


def siblings(*pairs: str) -> dict[str, str]:
    return {f"system/cpu/cpu{i}/topology/thread_siblings_list": f"{text}\n" for i, text in enumerate(pairs)}


CLOCKS = {
    f"system/cpu/cpu{i}/cpufreq/cpuinfo_max_freq": str(kilohertz)
    for i, kilohertz in enumerate([3200000, 3200000, 1000000, 1000000])
}
INTEL = {"cpu_core/cpus": "0-3\n", "cpu_atom/cpus": "4-7\n"}
TWO_EACH = ("0-1", "0-1", "2,3", "2,3")


@pytest.mark.parametrize(
    ("files", "allowed", "expected"),
    [
        (capacities(446, 446, 446, 446, 1024, 1024), range(6), 2),
        (capacities(325, 325, 325, 780, 780, 780, 780, 1024), range(8), 5),
        (capacities(446, 446, 1024, 1024), (0, 1), 0),
        (capacities(446, 446, 1024, 1024), (0, 3), 1),
        (capacities(1024, 1024), range(2), 0),
        (capacities(1024, 446), range(3), 0),
        (CLOCKS, range(4), 2),
        (INTEL | siblings(*TWO_EACH, "4", "5", "6", "7"), range(8), 2),
        (INTEL | siblings(*TWO_EACH), (0, 2, 4), 2),
        (INTEL, (4, 5), 0),
        ({"cpu_core/cpus": "0-3"} | capacities(*[1024] * 4), range(4), 0),
        ({"cpu_core/cpus": "nonsense", "cpu_atom/cpus": "1-"}, range(2), 0),
        ({}, range(4), 0),
    ],
)
def test_fast_cores_are_counted_where_cores_differ(
    tmp_path: Path, files: dict[str, str], allowed: Sequence[int], expected: int
) -> None:
    """Big cores beside little ones, by capacity or clock; P cores beside E cores, where threads
    share cores.
    """
    write(tmp_path, files)
    assert fast_cores(allowed, tmp_path / "system" / "cpu") == expected


@contextlib.contextmanager
def control_group() -> Iterator[Path]:
    """A control group of this machine with half a CPU; skips where none can be made."""
    for root, limits in (
        (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}),
        (Path("/sys/fs/cgroup"), {"cpu.max": "50000 100000"}),
    ):
        group = root / f"nearfar-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if all((group / name).exists() for name in limits):
                for name, value in limits.items():
                    (group / name).write_text(value)
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("this system lets no control group be made here")


def test_a_real_control_group_limits_the_threads() -> None:
    with control_group() as group:
        code = (
            f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            "from nearfar.edge_runtime.executors.cpu.cores import usable_cores\n"
            "from nearfar.processors import cpu_quota\n"
            "print(cpu_quota(), usable_cores())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.stdout.split() == ["0.5", "1"], done.stderr
