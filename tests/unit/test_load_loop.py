"""Requests of one client do not hold up others: their work is done outside the event loop.

The measure is the CPU time of the loop's own thread, which other processes do not change.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nearfar.edge_runtime.openai.context import fit_context
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import TokenLogprob, TopLogprob
from nearfar.edge_runtime.text.beside import LARGE
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.turns import TURN, Steps, in_turns
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.logs import AuditEntry, AuditLog, TextFormatter, _Queued, request_id
from nearfar.fallback_server.http.shapes import ChatShape, CompletionShape, ResponseHead, embeddings
from nearfar.fallback_server.http.writing import written
from tests.support.servers import MODEL, RunningServer, tiny_engine, tokenizer_directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    made = RunningServer(lambda: tiny_engine(tmp_path_factory.mktemp("tiny")))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("path", "field", "says"),
    [
        ("/v1/completions", {"prompt": [1] * 1_000_000}, "1000000 tokens"),
        ("/v1/completions", {"prompt": "x" * 3_000_000}, "3000000 tokens"),
        ("/v1/embeddings", {"input": [1] * 1_000_000}, "1000000 tokens"),
    ],
    ids=["tokens", "text", "embeddings"],
)
def test_a_body_of_megabytes_takes_little_of_the_loop(
    server: RunningServer, path: str, field: dict[str, Any], says: str
) -> None:
    """Before the fix a million token ids stopped every stream for 0.3 s, only to be rejected for their
    number.

    The unit is the time to write a million numbers as JSON and to read them again.
    """
    unit = time.thread_time()
    json.loads(json.dumps([1] * 1_000_000))
    unit = time.thread_time() - unit
    data = json.dumps({"model": MODEL, **field}).encode()
    before = server.loop_seconds
    with httpx.Client(base_url=server.address, timeout=60) as http:
        answer = http.post(path, content=data, headers={"content-type": "application/json"})
    loop = server.loop_seconds - before
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert loop < unit


def test_a_large_body_that_is_wrong_is_told_the_same_as_a_small_one(server: RunningServer) -> None:
    with httpx.Client(base_url=server.address, timeout=60) as http:
        told = [
            http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * size, "n": "many"}).json()
            for size in (1, 100_000)
        ]
    assert told[0] == told[1]


@pytest.mark.parametrize("shape", [ChatShape, CompletionShape])
def test_whole_answers_look_at_each_piece_once(shape: Callable[[ResponseHead], Any]) -> None:
    """Before the fix each of 256 answers went through the pieces of all: 1.2 s on the loop."""

    class Counted(Piece):
        looks = 0

        @property
        def index(self) -> int:  # type: ignore[override]
            Counted.looks += 1
            return self.__dict__["number"]  # type: ignore[no-any-return]

    def piece(number: int) -> Piece:
        made = object.__new__(Counted)
        fields = {"text": "x", "reasoning": "", "tool_calls": (), "logprobs": (), "finish": None, "tokens": 1}
        made.__dict__.update(fields, number=number)
        return made

    pieces = [piece(number % 16) for number in range(320)]
    whole = shape(ResponseHead("id", MODEL, False, False), 16).whole(pieces, TokenUsage(1, 320))
    assert len(json.loads("".join(written(whole)))["choices"]) == 16
    assert Counted.looks <= 2 * len(pieces)


def test_a_long_record_is_written_in_small_steps() -> None:
    """Each step holds the interpreter's lock, for which the event loop waits."""
    alternatives = [TopLogprob("t", -1.0, [116])] * 20
    token = TokenLogprob("t", -1.0, [116], alternatives)
    pieces = [Piece(number % 2, "t", logprobs=(token,), tokens=1, offsets=(0,)) for number in range(400)]
    head = ResponseHead("id", MODEL, False, False)
    for record in (
        embeddings(MODEL, iter(np.ones((3, 5000), np.float32)), 3),
        ChatShape(head, 2).whole(pieces, TokenUsage(1, 400)),
        CompletionShape(head, 2).whole(pieces, TokenUsage(1, 400)),
    ):
        steps = [*written(record)]
        assert max(map(len, steps)) < 4096
        json.loads("".join(steps))


async def test_a_short_work_has_its_turn_beside_a_long_one() -> None:
    def steps(number: int) -> Steps[int]:
        for _ in range(number):
            time.sleep(TURN / 2)
            yield
        return number

    def wrong() -> Steps[int]:
        yield
        raise ValueError("no number")

    long = [asyncio.create_task(in_turns(steps(10_000))) for _ in range(3)]
    await asyncio.sleep(0)
    assert await in_turns(steps(3)) == 3
    with pytest.raises(ValueError, match="no number"):
        await in_turns(wrong())
    assert not any(task.done() for task in long)
    for task in long:
        task.cancel()
    await asyncio.wait(long)
    assert await in_turns(steps(1)) == 1


async def test_long_texts_are_rendered_and_encoded_beside_the_loop() -> None:
    threads: list[int] = []

    def encode(messages: Sequence[Any]) -> list[int]:
        threads.append(threading.get_ident())
        return [1] * sum(len(message["content"]) for message in messages)

    chat = [{"role": "user", "content": "x" * LARGE}, {"role": "user", "content": "y"}]
    for policy in ("error", "truncate-oldest"):
        await fit_context(chat, policy, (LARGE // 2, 10), encode, goes_on=False)  # type: ignore[arg-type]
    assert threading.get_ident() not in threads


async def test_the_tokenizer_leaves_the_lock_to_others_while_it_encodes(tmp_path: Path) -> None:
    """`Tokenizer.encode` holds the lock until it is done, also in a thread, so a thread would not help."""
    codec = TextCodec.open_directory(tokenizer_directory(tmp_path), 256)
    text = "one two three " * 40_000
    work = asyncio.create_task(asyncio.to_thread(codec.encode, text))
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert turns > 5
    assert await work == codec.encode(text)
    short = text[: LARGE - 1]
    assert list(codec.tokenizer.encode(short).ids) == codec.encode(short)
    assert codec.encode(short + "x") == list(codec.tokenizer.encode(short + "x").ids)


def test_a_disk_that_hangs_holds_up_no_request(tmp_path: Path) -> None:
    audit, goes_on = AuditLog(tmp_path / "audit.jsonl", False), threading.Event()
    write = audit._file.write

    def hanging(line: str) -> int:
        assert goes_on.wait(60)
        return write(line)

    audit._file.write = hanging  # type: ignore[method-assign]
    for number in range(3):
        audit.write(AuditEntry(f"r{number}", "k", "/v1/completions", MODEL, 200, "ok", 1, 1, 0.1))
    assert (tmp_path / "audit.jsonl").read_text() == ""
    goes_on.set()
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["request_id"] for line in lines] == ["r0", "r1", "r2"]


def test_a_terminal_that_hangs_holds_up_no_request() -> None:
    told: queue.Queue[Any] = queue.Queue(2)
    handler = _Queued(told)
    handler.setFormatter(TextFormatter())
    token = request_id.set("r7")
    try:
        for number in range(3):  # no process reads the terminal
            handler.handle(logging.LogRecord("a", logging.INFO, "a.py", 1, "line %d", (number,), None))
    finally:
        request_id.reset(token)
    lines = [told.get_nowait().getMessage() for _ in range(2)]
    assert [line.split(" ", 1)[1] for line in lines] == ["info line 0 r7", "info line 1 r7"]
    handler.close()
