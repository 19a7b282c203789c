"""Long work in small steps, in one thread beside the event loop that all such works share turn by turn.

A thread alone does not keep an event loop free: a thread that computes holds the interpreter's lock for 5 ms
or more whenever the loop wants to go on. Here nobody holds it for longer than a step, and a short work does
not wait until a long one has ended.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A work: each `yield` ends a step, which should take half a millisecond at most; it returns the result."""

TURN = 0.0005
"""Seconds of work after which the next work has its turn."""
REST = 0.00005
"""Seconds between two turns, in which other threads get the interpreter's lock."""


async def in_turns(work: Steps[T]) -> T:
    """The result of a work, which is done in the shared thread. Who is cancelled ends the work."""
    future: Future[T] = Future()
    _line().put((work, future))
    return await asyncio.wrap_future(future)


@cache
def _line() -> queue.SimpleQueue[tuple[Steps[Any], Future[Any]]]:
    """The works that wait for their next turn, and the thread that does them."""
    line: queue.SimpleQueue[tuple[Steps[Any], Future[Any]]] = queue.SimpleQueue()
    threading.Thread(target=_work_always, args=(line,), name="turns", daemon=True).start()
    return line


def _work_always(line: queue.SimpleQueue[tuple[Steps[Any], Future[Any]]]) -> None:
    while True:
        work, future = line.get()
        if future.cancelled():
            work.close()
        elif _goes_on(work, future):
            line.put((work, future))
        del work, future  # or the last result would lie here until there is another work
        time.sleep(REST)


def _goes_on(work: Steps[Any], future: Future[Any]) -> bool:
    """Do the steps of one turn; whether there are more."""
    end = time.perf_counter() + TURN
    try:
        while time.perf_counter() < end:
            next(work)
    except StopIteration as done:
        if future.set_running_or_notify_cancel():
            future.set_result(done.value)
    except BaseException as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
    else:
        return True
    return False
