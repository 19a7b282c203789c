"""Event streams that come in parts, and the time that a server has for its next token."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from nearfar.remote.clock import Clock, StoppedError
from nearfar.remote.events import EVENT_BYTES, TooLongError, datas

TEXT = b'\xef\xbb\xbf: hello\n\ndata: {"a":\ndata:  1}\nid: 3\n\n'
TEXT += b"event: x\ndata: two\n\n\n\ndata\n\ndata:three\n\n"
FOUND = [b'{"a":\n 1}', b"two", b"three"]


class Parts(httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    async def __aiter__(self):  # type: ignore[no-untyped-def]
        for part in self.parts:
            yield part


async def read(parts: list[bytes]) -> list[bytes]:
    response = httpx.Response(200, stream=Parts(parts))
    return [data for found in [found async for found in datas(response)] for data in found]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_are_found_however_they_are_cut(end: bytes, size: int) -> None:
    text = (TEXT + b"data: [DONE]\n\ndata: after\n\n").replace(b"\n", end)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    if size > 2:  # a byte order mark comes in one part
        assert [each.replace(end, b"\n") for each in await read(parts)] == FOUND


async def test_an_event_without_an_end_costs_no_more_than_its_bytes() -> None:
    with pytest.raises(TooLongError):
        await read([b"data: "] + [b"x" * 64] * (EVENT_BYTES // 64 + 1))


async def test_a_clock_counts_only_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test moves the loop's time on: a busy machine would use up a time of less than a second."""
    loop, passed = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + passed)

    async def takes(seconds: float) -> str:
        nonlocal passed
        passed += seconds
        await asyncio.sleep(0.01)  # timers that are due ring first
        return "done"

    clock = Clock(600)
    await clock.wait(takes(200))
    passed += 900
    await clock.wait(takes(200))
    with pytest.raises(TimeoutError, match="600 s"):
        await clock.wait(takes(200))
    clock.wind(600)
    assert await clock.wait(takes(200)) == "done"
    clock.close()


async def test_a_clock_ends_the_wait_and_leaves_other_cancellations_alone() -> None:
    clock = Clock(5)
    asyncio.get_running_loop().call_later(0.01, clock.stop)
    with pytest.raises(StoppedError):
        await clock.wait(asyncio.sleep(5))
    with pytest.raises(StoppedError):
        await clock.wait(asyncio.sleep(5))
    other = Clock(5)
    task = asyncio.create_task(other.wait(asyncio.sleep(5)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    clock.close()
    other.close()
