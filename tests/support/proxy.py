"""A TCP proxy that a test can cut, as a network does."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Proxy:
    """Forwards connections to a port and counts them; can cut an answer after a number of its bytes
    (once).
    """

    def __init__(self, target: int, listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.target = target
        self.connections = 0
        self.cut_after: int | None = None
        self._down = False
        self._open: list[socket.socket] = []
        self._socket = socket.create_server(listen)
        self.host, self.port = self._socket.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """The proxy's address."""
        return f"http://{self.host}:{self.port}"

    @property
    def down(self) -> bool:
        """Whether the server counts as gone: then connections end, also those that clients keep open."""
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._down = down
        if down:
            for client in self._open:
                _abort(client)
            self._open.clear()

    def close(self) -> None:
        """Stop listening. The thread that accepts connections is woken, and ends."""
        with suppress(OSError):  # it was closed before
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                self.connections += 1
                if self.down:
                    _abort(client)
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    _abort(client)
                    continue
                self._open.append(client)
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answer: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(512):
                passed += len(data)
                if answer and self.cut_after is not None and passed >= self.cut_after:
                    self.cut_after = None
                    time.sleep(0.2)  # earlier bytes arrive first, because the reset would discard them
                    _abort(sink)
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _abort(connection: socket.socket) -> None:
    """Reset the connection, as a crash or a lost network does."""
    with suppress(OSError):  # readers of the socket are woken first: until then the kernel keeps it open
        connection.shutdown(socket.SHUT_RD)
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        connection.close()
