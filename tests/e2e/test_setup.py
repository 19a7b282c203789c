"""The commands that `make setup` runs before there is a virtual environment."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.paths import ROOT

LOCKS = {"lists": Path("/var/lib/apt/lists/lock"), "dpkg": Path("/var/lib/dpkg/lock-frontend")}
INSTALL = ROOT / "scripts" / "apt_install.sh"


@pytest.fixture(params=LOCKS)
def held(request: pytest.FixtureRequest) -> Iterator[IO[str]]:
    """One of apt's locks, held as by another apt process; closing the file releases it."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("installing Debian packages takes apt and root")
    with LOCKS[request.param].open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield file


def start(wait_s: int) -> subprocess.Popen[str]:
    env = os.environ | {"APT_WAIT": str(wait_s)}
    return subprocess.Popen(
        [INSTALL, "libc-bin"], env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_setup_waits_for_another_apt(held: IO[str]) -> None:
    installing = start(wait_s=120)
    time.sleep(3)
    assert installing.poll() is None, installing.communicate()
    held.close()
    out, errors = installing.communicate(timeout=300)
    assert installing.returncode == 0, out + errors


def test_setup_gives_up_and_says_so(held: IO[str]) -> None:
    installing = start(wait_s=2)
    out, errors = installing.communicate(timeout=300)
    assert installing.returncode != 0
    assert "lock" in out + errors
