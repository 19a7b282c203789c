"""Runs several workers until all are done; if one fails, or the caller is cancelled, none goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def together(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Run `work` in `count` tasks. Raises the first error, after the other tasks have ended."""
    tasks = [asyncio.ensure_future(work()) for _ in range(count)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
