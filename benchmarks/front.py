"""Events a second that one front passes on from an upstream to its clients.

    python benchmarks/front.py [--streams 64] [--events 400] [--rounds 3] [--other SRC]

An upstream that computes nothing streams `--events` chunks of a chat to each of `--streams` clients at once,
one chunk in each write and a chunk to every stream in turn, as an engine does that computes a step for all.
Three ways to it are measured in turn, in the same run: `direct` (no front), `renamed` (a front that gives the
model another name, so that it reads and writes each chunk) and `untouched` (a front that passes bytes on).
`--other` measures the front of another checkout as well: SRC is its src folder. The figure for a process is
the number of events for each CPU second of the front, which other programs on the machine change little; the
events a second on the clock are shown beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

MODEL = "upstream-model"
ALIAS = "alias"
START_SECONDS = 60.0
SOURCE = Path(__file__).parents[1] / "src"


def chunk(text: str, finish: str | None = None) -> bytes:
    """Return a chunk as vLLM writes it."""
    record = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1790000000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "delta": {"content": text},
                "logprobs": None,
                "finish_reason": finish,
                "token_ids": None,
            }
        ],
    }
    return b"data: " + json.dumps(record, separators=(",", ":")).encode() + b"\n\n"


def ending(events: int) -> bytes:
    """Return the chunk with the usage, and the end of the stream."""
    usage = {"prompt_tokens": 9, "completion_tokens": events, "total_tokens": 9 + events}
    record = {
        "id": "chatcmpl-0",
        "object": "chat.completion.chunk",
        "created": 1790000000,
        "model": MODEL,
        "choices": [],
        "usage": usage,
    }
    return b"data: " + json.dumps(record, separators=(",", ":")).encode() + b"\n\ndata: [DONE]\n\n"


class Upstream:
    """An upstream whose streams all wait for each other: in each step every stream gets one chunk."""

    def __init__(self, streams: int, events: int, rate: float) -> None:
        self._streams, self._events, self._rate = streams, events, rate
        self._waiting: list[asyncio.StreamWriter] = []

    async def serve(self) -> None:
        """Listen until the process is ended, and print the port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line[15:])
                        for line in head.split(b"\r\n")
                        if line.lower().startswith(b"content-length")
                    ),
                    0,
                )
                await reader.readexactly(length)
                if head.startswith(b"POST"):
                    self._waiting.append(writer)
                    if len(self._waiting) == self._streams:
                        waiting, self._waiting = self._waiting, []
                        asyncio.get_running_loop().create_task(self._stream(waiting))
                else:
                    found = head.startswith(b"GET /v1/models ")
                    body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
                    status = b"200 OK" if found else b"404 Not Found"
                    writer.write(
                        b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                        % (status, len(body), body)
                    )

    async def _stream(self, writers: list[asyncio.StreamWriter]) -> None:
        """Write the answers of all streams, a chunk to each in turn."""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            for writer in writers:
                writer.write(head)
            texts = [_framed(chunk(f" word{at % 97}")) for at in range(97)]
            begun = time.monotonic()
            for step in range(self._events):
                for writer in writers:
                    writer.write(texts[step % 97])
                    await writer.drain()
                due = begun + (step + 1) / self._rate if self._rate else 0.0
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
            end = _framed(chunk("", "stop")) + _framed(ending(self._events)) + b"0\r\n\r\n"
            for writer in writers:
                writer.write(end)
                await writer.drain()


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass(frozen=True)
class Round:
    """One round: events, seconds on the clock, and CPU seconds of the front."""

    events: int
    seconds: float
    cpu: float


async def load(port: int, model: str, streams: int) -> int:
    """Read all streams to their end at once; return how many events came."""
    counts = await asyncio.gather(*(_read(port, model) for _ in range(streams)))
    return sum(counts)


async def _read(port: int, model: str) -> int:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    count, tail = 0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"a stream was cut: {tail[-300:]!r}")
        count += data.count(b'"delta"')
        tail = (tail + data)[-400:]
    if b"[DONE]" not in tail:
        raise SystemExit(f"a stream ended with an error: {tail[-300:]!r}")
    writer.close()
    return count


@contextlib.contextmanager
def front(port: int, source: Path, *options: str) -> Iterator[tuple[int, psutil.Process]]:
    """Start a front of the upstream; gives its port and its process."""
    command = [
        sys.executable,
        "-m",
        "nearfar",
        "serve",
        f"http://127.0.0.1:{port}",
        "--port",
        "0",
        "--log-level",
        "warning",
        "--engine",
        "upstream",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split(" at ")[1].split()[0]
        deadline = time.monotonic() + START_SECONDS
        while httpx.get(f"{url}/ready").status_code != 200:
            if time.monotonic() > deadline:
                raise SystemExit("the front does not get ready")
            time.sleep(0.1)
        yield int(url.rsplit(":", 1)[1]), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def measured(port: int, model: str, streams: int, process: psutil.Process | None) -> Round:
    """Measure one round."""
    before = _cpu(process)
    start = time.monotonic()
    events = asyncio.run(load(port, model, streams))
    return Round(events, time.monotonic() - start, _cpu(process) - before)


def _cpu(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    used = process.cpu_times()
    return float(used.user + used.system)


def main() -> None:
    """Measure all ways in turn and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.0, help="steps a second; 0: as many as there can be")
    parser.add_argument("--other", type=Path)
    parser.add_argument("--upstream", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.upstream:
        asyncio.run(Upstream(given.streams, given.events, given.rate).serve())
        return
    command = [
        sys.executable,
        __file__,
        "--upstream",
        "--streams",
        str(given.streams),
        "--events",
        str(given.events),
        "--rate",
        str(given.rate),
    ]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as upstream,
        contextlib.ExitStack() as open_,
    ):
        open_.callback(upstream.terminate)
        assert upstream.stdout is not None
        port = int(upstream.stdout.readline())
        ways: dict[str, tuple[int, str, psutil.Process | None]] = {"direct": (port, MODEL, None)}
        ways["renamed"] = (
            *(made := open_.enter_context(front(port, SOURCE, "--name", ALIAS)))[:1],
            ALIAS,
            made[1],
        )
        ways["untouched"] = (*(made := open_.enter_context(front(port, SOURCE)))[:1], MODEL, made[1])
        if given.other:
            ways["other"] = (*(made := open_.enter_context(front(port, given.other)))[:1], MODEL, made[1])
        rounds: dict[str, list[Round]] = {name: [] for name in ways}
        for at in range(given.rounds + 1):
            for name, (to, model, process) in ways.items():
                found = measured(to, model, given.streams, process)
                if at:  # the first round warms up
                    rounds[name].append(found)
    for name, several in rounds.items():
        clock = statistics.median(each.events / each.seconds for each in several)
        own = (
            statistics.median(each.events / each.cpu for each in several if each.cpu)
            if name != "direct"
            else 0
        )
        print(
            f"{name:10} {clock:8,.0f} events a second" + (f"  {own:8,.0f} for each CPU second" if own else "")
        )


if __name__ == "__main__":
    main()
