"""A Redis server of a test's own, from Debian's package redis-server."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest


class RedisServer:
    """A server on a free port of 127.0.0.1 that writes nothing to disk. Skips the test where Redis or its
    client is missing.
    """

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("redis", reason="redis is not installed (pip install 'nearfar[limits]')")
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed (Debian: redis-server)")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._folder = folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        command = [
            "redis-server",
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self._process = subprocess.Popen([*command, "--dir", str(self._folder)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
