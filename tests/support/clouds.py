"""A server of OpenAI's interface whose answers a test scripts byte by byte: other servers behave in ways that
ours never does.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

Json = dict[str, Any]
Answer = Callable[[str, Json], Iterable[bytes]]
"""From the path and body of a request to the bytes of its response. The connection is closed after them."""


class Cloud:
    """Answers from threads of its own. `asked`: path and body of every request; a form's bytes are under
    "form".
    """

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self.asked: list[tuple[str, Json]] = []
        self.stopped = threading.Event()

        class Handler(socketserver.StreamRequestHandler):
            def handle(handler) -> None:
                with suppress(OSError):
                    path, body = _request(handler.rfile)
                    self.asked.append((path, body))
                    for part in answer(path, body):
                        handler.connection.sendall(part)
                        if self.stopped.is_set():
                            return

        class Threads(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 64

        self._server = Threads(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def posts(self, path: str | None = None) -> list[Json]:
        """Bodies of all requests except those for a list of models."""
        return [
            body
            for asked, body in self.asked
            if asked not in ("/v1/models", "/openapi.json") and path in (None, asked)
        ]

    def __enter__(self) -> Cloud:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()


def _request(file: Any) -> tuple[str, Json]:
    head = [file.readline()]
    while head[-1] not in (b"\r\n", b""):
        head.append(file.readline())
    path = head[0].split()[1].decode() if head[0].split() else ""
    length = next(
        (int(line.split(b":")[1]) for line in head if line.lower().startswith(b"content-length")), 0
    )
    data = file.read(length)
    if any(line.lower().startswith(b"content-type: multipart/") for line in head):
        return path, {"form": data}
    return path, json.loads(data) if data else {}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


def reply(status: str, body: Json | str | bytes, *headers: str) -> bytes:
    """A whole response."""
    data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
"""Head of a stream that ends when its connection closes."""
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
"""Head of a chunked stream, in which a cut differs from the end."""
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """A part of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(record: Json) -> bytes:
    """An event of a stream."""
    return b"data: " + json.dumps(record).encode() + b"\n\n"


def said(text: str = "", finish: str | None = None, **delta: Any) -> bytes:
    """A chat event with a piece of its answer."""
    return event(
        {"choices": [{"index": 0, "delta": {"content": text or None, **delta}, "finish_reason": finish}]}
    )


def usage(prompt: int, completion: int) -> bytes:
    """The event with the token counts."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def listing(*models: str) -> bytes:
    """The response of /v1/models."""
    return reply("200 OK", {"data": [{"id": name} for name in models]})


def chatting(text: str = "Hi.", model: str = "m", **paths: Callable[[Json], Iterable[bytes]]) -> Answer:
    """An Answer that lists `model` and answers chats with `text`. `paths`: answers for other paths, by their
    last word.
    """

    def answer(path: str, body: Json) -> Iterator[bytes]:
        word = path.rsplit("/", 1)[-1]
        if word in paths:
            yield from paths[word](body)
        elif word == "models":
            yield listing(model)
        elif path == "/v1/chat/completions":
            yield STREAM + said(text) + said(finish="stop") + usage(3, 2) + DONE
        else:
            yield reply("404 Not Found", {"error": {"message": f"no {path}"}})

    return answer


def described(paths: dict[str, list[str]]) -> Json:
    """An OpenAPI description of paths with the fields of their requests."""
    return {
        "paths": {
            path: {
                "post": {
                    "requestBody": {
                        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/S{at}"}}}
                    }
                }
            }
            for at, path in enumerate(paths)
        },
        "components": {
            "schemas": {
                f"S{at}": {"properties": {name: {} for name in fields}}
                for at, fields in enumerate(paths.values())
            }
        },
    }
