"""Works on long texts in a thread, so that the event loop stays free for other answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

T = TypeVar("T")

LARGE = 16 << 10
"""Characters of text from which on work is done in a thread; for less, the two thread switches (0.1 ms) cost
more.
"""


async def beside(work: Callable[[], T], characters: int) -> T:
    """The result of `work` on a text of `characters` characters; long ones are processed in a thread."""
    return await asyncio.to_thread(work) if characters >= LARGE else work()


def characters(messages: Seq[Mapping[str, Any]]) -> int:
    """The approximate number of characters of a conversation."""
    return sum(map(_said, messages))


def _said(message: Mapping[str, Any]) -> int:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    calls = message.get("tool_calls")
    given = [
        function.get("arguments")
        for call in (calls if isinstance(calls, list) else ())
        if isinstance(call, Mapping) and isinstance(function := call.get("function"), Mapping)
    ]
    return sum(map(_length, (message.get("content"), reasoning, *given)))


def _length(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(_length(part.get("text")) for part in content if isinstance(part, Mapping))
    return 0
