"""An HTTP server that plays the events of the hand-over: each request for an answer gets the next part."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from typing import Any

CHUNK: dict[str, Any] = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
TOOL = {"index": 0, "id": "t", "type": "function", "function": {"name": "go", "arguments": "{}"}}


class ScriptedServer:
    """Plays `parts`, each a list of events (see tests/vectors/routing/handover_scripts.py). `left`: the parts
    that were not played.
    """

    def __init__(self, parts: list[list[str]]) -> None:
        self._parts = list(parts)
        self.bodies: list[Any] = []

        class Handler(socketserver.StreamRequestHandler):
            def handle(handler) -> None:
                while (head := handler.rfile.readline()) and self._serve(handler, head):
                    pass

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def left(self) -> int:
        """The number of parts that nobody requested."""
        return len(self._parts)

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: Any, head: bytes) -> bool:
        """Answer one request. Returns whether the connection stays open."""
        length = 0
        while (line := handler.rfile.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = handler.rfile.read(length)
        if head.startswith(b"GET"):
            listed = {"data": [{"id": "m", "max_model_len": 999}]}
            return self._whole(handler, "200 OK", listed)
        self.bodies.append(json.loads(body))
        part = self._parts.pop(0) if self._parts else ["failed x 599"]
        kind, _, *words = part[0].split()
        if kind == "failed" and words[0].isdigit():
            return self._whole(handler, f"{words[0]} No", {"error": {"message": "not now"}})
        if kind == "refused":
            return self._whole(
                handler, "400 Bad Request", {"error": {"message": "not this", "param": words[0]}}
            )
        handler.wfile.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        return all(self._play(handler, event.split()) for event in part)

    def _whole(self, handler: Any, status: str, data: Any) -> bool:
        said = json.dumps(data).encode()
        handler.wfile.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(said)}\r\n\r\n".encode() + said)
        return True

    def _play(self, handler: Any, words: list[str]) -> bool:
        """Play one event. Returns whether the connection stays open."""
        match words:
            case ["piece", _, count, *more]:
                delta = {"tool_calls": [TOOL]} if "calls" in more else {"content": "x "}
                for _ in range(int(count)):
                    self._say(
                        handler, {**CHUNK, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
                    )
                if finish := next((word[1:] for word in more if word.startswith("=")), None):
                    self._say(
                        handler, {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
                    )
            case ["ended", *_]:
                self._write(handler, "data: [DONE]\n\n")
                handler.wfile.write(b"0\r\n\r\n")
            case ["failed", _, "error"]:
                self._say(handler, {"error": {"message": "overloaded"}})
            case ["failed", _, "shape"]:
                self._write(handler, "data: not json\n\n")
            case ["failed", _, "timeout"]:
                time.sleep(1.5)
                return False
            case _:  # the connection is cut; so it is after an unknown event
                return False
        return True

    def _say(self, handler: Any, record: Any) -> None:
        self._write(handler, f"data: {json.dumps(record)}\n\n")

    def _write(self, handler: Any, text: str) -> None:
        said = text.encode()
        handler.wfile.write(f"{len(said):x}\r\n".encode() + said + b"\r\n")
        handler.wfile.flush()
