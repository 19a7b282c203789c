"""The memory that this process may use: the machine's, or less in a control group."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nearfar.memory import HostMemory, host_memory
from tests.support.control_groups import control_group
from tests.support.paths import ROOT

DEEP = "memory/docker/abc/memory"
V1 = "5:cpuset:/\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n"
STAT = "cache 99\nactive_file 30\ninactive_file 20\nanon 400\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {}, (8000, 5000)),
        ("", {}, (8000, 5000)),
        ("0::/", {"memory.max": "1000\n", "memory.current": "600", "memory.stat": STAT}, (1000, 450)),
        ("0::/", {"memory.max": "1000", "memory.current": "600"}, (1000, 400)),
        ("0::/", {"memory.max": "max", "memory.high": "2000", "memory.current": "500"}, (2000, 1500)),
        ("0::/", {"memory.max": "max", "memory.current": "600"}, (8000, 5000)),
        ("0::/", {"memory.max": "20000", "memory.current": "600"}, (8000, 5000)),
        ("0::/", {"memory.max": "1000", "memory.current": "1100"}, (1000, 0)),
        ("0::/", {"memory.max": "1000", "memory.current": "nonsense"}, (8000, 5000)),
        (
            "0::/pod/app",
            {"pod/app/memory.max": "3000", "pod/app/memory.current": "100",
             "pod/memory.max": "4000", "pod/memory.current": "3900"},
            (3000, 100),
        ),
        (
            V1,
            {f"{DEEP}.limit_in_bytes": "1000", f"{DEEP}.usage_in_bytes": "900",
             f"{DEEP}.stat": "total_active_file 300\ntotal_inactive_file 50\nactive_file 1\n"},
            (1000, 450),
        ),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "9"},
         (8000, 5000)),
    ],
)  # fmt: skip
def test_the_memory_is_the_least_of_the_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    membership: str,
    files: dict[str, str],
    expected: tuple[int, int],
) -> None:
    machine = psutil.virtual_memory()._replace(total=8000, available=5000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    for name, text in {"self": membership, **{f"group/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path / "self", tmp_path / "group") == HostMemory(*expected)


def test_nobody_asks_for_the_memory_of_the_machine() -> None:
    """psutil tells the whole machine's memory, also in a container with a part of it: Linux ends a process
    that takes more than its part.
    """
    parts = (ROOT / name for name in ("src/nearfar", "step", "format", "build", "targets", "edge_runtime",
                                      "remote", "fallback_server", "routing"))  # fmt: skip
    asks = {path for part in parts for path in part.rglob("*.py")
            if re.search(r"virtual_memory\(", path.read_text())}  # fmt: skip
    assert {str(path.relative_to(ROOT)) for path in asks} == {"src/nearfar/memory.py"}


def test_a_real_control_group_limits_the_memory() -> None:
    limit = 200 << 20
    with control_group(limit) as group:
        if group is None:
            pytest.skip("this system lets no control group be made here")
        code = (
            f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            "from nearfar.memory import host_memory\n"
            "print(host_memory().total, host_memory().available)"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        total, available = map(int, done.stdout.split())
        assert total == limit, done.stderr
        assert 0 < available <= limit
