"""Hostile clients and requests beside eight healthy streams, which must finish with the right tokens, over
every engine: one in each run.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.hostile import ENGINES, HOSTILE, Rig, attack, completion, healthy, open_rig
from tests.support.servers import RunningServer
from tests.support.turns import paired


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Rig]]:
    made: dict[str, Rig] = {}

    def get(kind: str) -> Rig:
        if kind not in made:
            artifact = get("artifact") if kind == "upstream" else None
            made[kind] = open_rig(kind, tmp_path_factory.mktemp(kind), artifact)
        return made[kind]

    yield get
    for rig in reversed(made.values()):
        rig.close()


@pytest.fixture(params=[kind for _, kind in paired(["engine"], ENGINES)])
def rig(request: pytest.FixtureRequest, rigs: Callable[[str], Rig]) -> Rig:
    if request.param == "torch":
        pytest.importorskip("transformers", reason="the torch engine is not here")
    return rigs(request.param)


async def test_hostile_requests_beside_healthy_streams(rig: Rig) -> None:
    """Each request gets its own status, all at once, during several rounds of healthy streams."""
    async with healthy(rig) as http:
        wrong = await asyncio.gather(*(attack(http, name) for name in HOSTILE))
    assert [what for what in wrong if what] == []


def connect(server: RunningServer, receive_buffer: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(30)
    made.connect(("127.0.0.1", server.port))
    return made


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(data)}\r\n\r\n"
    )
    return head.encode() + data


def closed_after(connection: socket.socket) -> float:
    """Seconds until the server closes the connection."""
    start = time.monotonic()
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{", b"HTTP/1.1 408"),
        (b"\x00\xff" * 50 + b"\r\n\r\n", b"HTTP/1.1 400"),
    ],
    ids=["nothing", "half of the headers", "half of the body", "noise"],
)
async def test_clients_that_stop_halfway(rig: Rig, sent: bytes, answer: bytes) -> None:
    def halfway() -> bytes:
        with connect(rig.server) as connection:
            connection.sendall(sent)
            got = b""
            while data := connection.recv(4096):
                got += data
            return got

    async with healthy(rig):
        try:
            async with asyncio.timeout(20):
                got = await asyncio.to_thread(halfway)
        except ConnectionResetError:
            got = b""
        assert got.startswith(answer)


async def test_a_client_that_vanishes(rig: Rig) -> None:
    async with healthy(rig):
        for _ in range(4):
            connection = connect(rig.server)
            connection.sendall(post(completion(max_tokens=900, stream=True, logit_bias={"257": -100})))
            await asyncio.to_thread(connection.recv, 100)
            # Closing the socket sends a reset, not a polite end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()


async def test_a_client_that_reads_one_byte_at_a_time(rig: Rig) -> None:
    """The client's window fills, the server stops writing, and after write_timeout the connection is cut and
    the work ends.
    """
    body = completion(max_tokens=900, n=4, stream=True, logprobs=20, logit_bias={"257": -100})
    with connect(rig.server, receive_buffer=2048) as connection:
        port = connection.getsockname()[1]
        async with healthy(rig):
            connection.sendall(post(body))
            for _ in range(200):
                await asyncio.to_thread(connection.recv, 1)
                if not rig.server.connected(port):
                    break
                await asyncio.sleep(0.1)
        assert not rig.server.connected(port)
    async with asyncio.timeout(10):
        while rig.engine.stats().running:
            await asyncio.sleep(0.05)
