"""Waits that Ctrl-C ends at once, also on Windows, where a long wait would not notice it; and work that can
be stopped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")
CTRL_C = 130
"""The exit code of a process that Ctrl-C ended, as in shells: 128 plus the signal's number."""
LOOK = 0.1
"""Seconds between two checks for a request to stop."""


class Stopped(Exception):
    """The work was stopped: another part has failed, or Ctrl-C was pressed."""


def interruptible(call: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Return a call's result, without waiting for it after Ctrl-C, or after `stop` is set: that raises
    Stopped.
    """
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:  # the error is raised again in the caller
            done.put((None, error))

    threading.Thread(target=work, name="nearfar-wait", daemon=True).start()
    result, error = _awaited(done, stop)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # a call without an error has given it


def side_by_side(
    work: Callable[[T], None],
    items: Collection[T],
    at_once: int,
    over: threading.Event,
    stop: threading.Event | None = None,
) -> None:
    """Do work for each item, `at_once` items at a time, until all are done; raises the first error.

    Ctrl-C and `stop` end it at once. `over` is set at the end, to stop work that is still running: nobody
    waits for it, as it may be waiting for a silent host.
    """
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)

    def one_by_one() -> None:
        with contextlib.suppress(queue.Empty):
            while not over.is_set():
                item = waiting.get_nowait()
                try:
                    work(item)
                except Exception as error:
                    ended.put(error)
                    return
                ended.put(None)

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=one_by_one, name="nearfar-work", daemon=True).start()
    try:
        for _ in items:
            if (error := _awaited(ended, stop)) is not None:
                raise error
    finally:
        over.set()


def _awaited(waiting: queue.SimpleQueue[T], stop: threading.Event | None) -> T:
    while True:
        try:
            return waiting.get(timeout=LOOK)
        except queue.Empty:
            if stop is not None and stop.is_set():
                raise Stopped from None
