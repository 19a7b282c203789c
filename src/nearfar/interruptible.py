"""Waits that Ctrl-C ends at once, on Windows too, where none longer than a moment would hear it; and work
that is told to stop.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")
CTRL_C = 130
"""The exit code of a process that Ctrl-C ended, as shells have it: 128 and the signal's number."""
LOOK = 0.1
"""Seconds between two looks at whether somebody has said stop."""


class Stopped(Exception):
    """Somebody wants no more of it: another part has failed, or it was Ctrl-C."""


def interruptible(call: Callable[[], T], stop: threading.Event | None = None) -> T:
    """What a call gives, without waiting for it after Ctrl-C, or once `stop` is set: then Stopped."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:  # it is the caller's
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
    """Do work for each item, for so many at once, until all are done or one has failed: then its error.

    Ctrl-C and `stop` end it at once. `over` is set at the end, for work that is still under way: nobody waits
    for that, as it can be in the middle of a host's silence.
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
