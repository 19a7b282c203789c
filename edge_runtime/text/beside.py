"""Work on long texts beside the event loop, on which all other answers wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

T = TypeVar("T")

LARGE = 16 << 10
"""Characters of text from which on work on it is done in a thread. Below, the two changes of thread (0.1 ms)
cost more than it does.
"""


async def beside(work: Callable[[], T], characters: int) -> T:
    """What `work` gives on a text of so many characters. Large ones are done in a thread."""
    return await asyncio.to_thread(work) if characters >= LARGE else work()


def characters(messages: Seq[Mapping[str, Any]]) -> int:
    """How much text a conversation has, about."""
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
