"""A server with the Hugging Face hub's interface over local directories, for the hub's own client.

It follows huggingface_hub 1: a repository's info and tree under /api/models, its files under
/owner/name/resolve, with entity tags and ranges. `cut`: bytes of a file after which its connection ends, once
for each file; `hold`: bytes after which nothing more is sent while the client listens.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by name. `asked` has the method and path of each request, with its range if it has one."""

    url: str
    repositories: dict[str, Path]
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    hold: dict[str, int] = field(default_factory=dict)
    held: threading.Event = field(default_factory=threading.Event)

    def fetched(self) -> set[str]:
        """The files whose contents were sent."""
        parts = [line.split() for line in self.asked if line.startswith("GET")]
        return {path.split("/resolve/")[1].partition("/")[2] for _, path, *_ in parts if "/resolve/" in path}

    def names(self, repository: str) -> list[str]:
        """The files of a repository."""
        root = self.repositories[repository]
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


@contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[Hub]:
    """Run the server on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests with which the client downloads a snapshot."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: tests read `asked`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = self.path.partition("?")[0].strip("/").split("/")
        hub.asked.append(" ".join(filter(None, (self.command, self.path, self.headers["Range"]))))
        api = path[:2] == ["api", "models"]
        repository, rest = ("/".join(path[2:4]), path[4:]) if api else ("/".join(path[:2]), path[2:])
        if repository not in hub.repositories:
            self._send(401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
        elif api and rest[:1] == ["tree"]:
            root = hub.repositories[repository]
            sized = [(name, (root / name).stat().st_size) for name in hub.names(repository)]
            self._json(
                [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sized]
            )
        elif api:
            files = [{"rfilename": name} for name in hub.names(repository)]
            self._json({"_id": "0", "id": repository, "sha": COMMIT, "siblings": files})
        else:
            self._file(hub, repository, "/".join(rest[2:]))

    def _file(self, hub: Hub, repository: str, name: str) -> None:
        file = hub.repositories[repository] / name
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        first = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        tag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.headers["Range"]:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        got = self.command == "GET"
        hold = hub.hold.pop(name, None) if got else None
        cut = hub.cut.pop(name, None) if got else None
        self._send(
            206 if self.headers["Range"] else 200, content[first:], headers, cut if hold is None else hold
        )
        if hold is not None:
            self.wfile.flush()
            hub.held.set()
            self.connection.settimeout(60)
            with suppress(OSError):
                self.rfile.read(1)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


def talk_to(at: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the hub's client in this process use this server, with a cache of its own."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", at.url)
    template = f"{at.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
