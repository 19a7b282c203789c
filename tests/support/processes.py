"""Processes and threads as the operating system reports them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil

LIMIT = 60.0
"""Seconds after which a forked process counts as hung."""


def pool_threads() -> Callable[[], int]:
    """Give a function that counts the worker threads of CPU artifacts that have started since now, as the
    system reports them.

    Threads of engines that other tests left to the garbage collector may end at any moment.
    """
    before = pool_thread_ids()
    return lambda: len(pool_thread_ids() - before)


def pool_thread_ids() -> set[str]:
    """The ids of the present worker threads of CPU artifacts."""
    found = set()
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            if file.read_text().strip() == "nearfar-cpu":
                found.add(file.parent.name)
    return found


def descendants_that_run(process: psutil.Process, text: str) -> list[psutil.Process]:
    """The descendants of the process that have this text in their command. A descendant may end meanwhile."""
    found = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # also of a zombie
            if text in " ".join(each.cmdline()):
                found.append(each)
    return found


def asleep(threads: set[str]) -> bool:
    """Whether all these threads go to sleep at the same time, and none of them waits for a lock that another
    releases.
    """

    def resting() -> int:
        before = ran(threads)
        states = {_listed(each, "stat").rpartition(")")[2].split()[0] for each in threads}
        time.sleep(0.01)
        return int(states == {"S"} and ran(threads) == before)

    return eventually(resting, 1)


def ran(threads: set[str]) -> dict[str, int]:
    """For each of these threads, the nanoseconds that it has run."""
    return {each: int(_listed(each, "schedstat").split()[0]) for each in threads}


def _listed(thread: str, name: str) -> str:
    return Path(f"/proc/self/task/{thread}/{name}").read_text()


def eventually(count: Callable[[], int], expected: int) -> bool:
    """Whether `count` reaches the expected number: the system lists a thread a moment longer than it runs."""
    end = time.monotonic() + LIMIT
    while count() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return count() == expected


def forked(child: Callable[[], bool]) -> bool:
    """The result of `child` in a forked process; False also if it raises or hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the warning is expected, because forking with threads is what the test is about
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
