"""The two kinds of load.

In a closed loop, a fixed number of clients each send the next request when the answer has come. In an open
loop, requests are sent when they are due, whatever the server does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearfar.fallback_server.bench.client import Ask, Client, Outcome

Done = Callable[[Outcome], None]


@dataclass
class LoadResult:
    """The outcomes of a level. `seconds`: from its beginning until the last answer, or until it was
    stopped.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    unfinished: int = 0
    interrupted: bool = False


async def closed(
    client: Client, asks: Sequence[Ask], concurrency: int, limit: float, done: Done
) -> LoadResult:
    """Send `asks` with `concurrency` of them under way at any time; no request begins after `limit`
    seconds.
    """
    start = time.perf_counter()
    run, waiting = LoadResult(), iter(asks)

    async def worker() -> None:
        for ask in waiting:
            now = time.perf_counter()
            if now - start > limit:
                return
            await _one(client, ask, now, run, done)

    return await _together(run, [worker() for _ in range(min(concurrency, len(asks)))], start)


async def open_(
    client: Client, asks: Sequence[Ask], at: Sequence[float], limit: float, done: Done
) -> LoadResult:
    """Send each of `asks` at its time in `at`; requests due after `limit` seconds are left out."""
    start = time.perf_counter()
    run = LoadResult()

    async def sender(ask: Ask, due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        await _one(client, ask, due, run, done)

    senders = [sender(ask, start + time_) for ask, time_ in zip(asks, at, strict=True) if time_ <= limit]
    return await _together(run, senders, start)


async def _one(client: Client, ask: Ask, due: float, run: LoadResult, done: Done) -> None:
    run.unfinished += 1  # the count stays so if the task is cancelled
    outcome = await client.stream(ask, due)
    run.unfinished -= 1
    run.outcomes.append(outcome)
    done(outcome)


async def _together(run: LoadResult, work: Sequence[Coroutine[Any, Any, None]], start: float) -> LoadResult:
    """Wait until all have ended or until Ctrl-C. On Ctrl-C asyncio.run cancels its main task, which keeps the
    outcomes so far.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        run.interrupted = True
        if (main := asyncio.current_task()) is not None:
            main.uncancel()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    run.seconds = time.perf_counter() - start
    return run
