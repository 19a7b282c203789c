"""Processes and threads, as the system sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

LIMIT = 60.0
"""Seconds that a forked process has before it counts as hung."""


def pool_threads() -> Callable[[], int]:
    """Counts the worker threads of CPU artifacts that have started since, as the system sees them.

    Those of engines that other tests left to the garbage collector may end at any moment.
    """
    before = _pool_threads()
    return lambda: len(_pool_threads() - before)


def _pool_threads() -> set[str]:
    found = set()
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if file.read_text().strip() == "nearfar-cpu":
                found.add(file.parent.name)
    return found


def eventually(count: Callable[[], int], expected: int) -> bool:
    """Whether `count` comes to what is expected: the system lists a thread a moment longer than it runs."""
    end = time.monotonic() + LIMIT
    while count() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return count() == expected


def forked(child: Callable[[], bool]) -> bool:
    """What `child` gives in a forked process; False also where it raises or hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # that threads and fork go ill together is what is tested
        process = os.fork()
    if process == 0:
        try:
            os._exit(0 if child() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if (done := os.waitpid(process, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(done[1]) == 0
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False
