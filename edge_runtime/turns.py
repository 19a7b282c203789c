"""Runs long work in small steps, in one background thread that all such work shares in turns.

A thread alone does not keep an event loop free: a computing thread holds the interpreter's lock for 5 ms or
more whenever the loop wants to continue. Here no work holds it for longer than a step, and short work does
not wait for long work to end.
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
"""A generator that does long work and returns its result: each `yield` ends a step of half a millisecond at
most.
"""

TURN = 0.0005
"""Seconds after which the next generator has its turn."""
REST = 0.00005
"""Seconds between two turns, in which other threads get the interpreter's lock."""


async def in_turns(work: Steps[T]) -> T:
    """Return the result of long work, done in the shared thread. Cancelling the call ends the work."""
    future: Future[T] = Future()
    _line().put((work, future))
    return await asyncio.wrap_future(future)


@cache
def _line() -> queue.SimpleQueue[tuple[Steps[Any], Future[Any]]]:
    """Start the shared thread; return the queue of generators that wait for their next turn."""
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
        del work, future  # otherwise the last result would be kept until the next work arrives
        time.sleep(REST)


def _goes_on(work: Steps[Any], future: Future[Any]) -> bool:
    """Run the steps of one turn; return whether the generator has more."""
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
