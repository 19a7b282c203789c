"""Serves the chat page and artifacts to a browser: static files, and the page's settings as JSON.

The standard library is enough for that, so that an installation for devices needs no web framework.
"""

import errno
import hashlib
import io
import json
import mimetypes
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import nearfar
from nearfar.errors import NearfarError
from nearfar.format.manifest import LISTING
from nearfar.hosts import answered_hosts, answers_for, bracketed

ARTIFACT_PREFIX = "/artifact/"
CONFIG_PATH = "/config.json"
MODELS_PATH = "/models.json"

# The system's table lacks shaders and templates, and on Windows it may give JavaScript as text/plain.
MIME_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".svg": "image/svg+xml",
    ".wgsl": "text/wgsl; charset=utf-8",
    ".wasm": "application/wasm",
    ".jinja": "text/plain; charset=utf-8",
    ".bin": "application/octet-stream",
    "": "text/plain; charset=utf-8",  # a file without suffix: LICENSE
}

# The page isolates itself: no other origin shares its process, and timers keep their full resolution.
ISOLATION = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

LOOPBACK = ("http://localhost:*", "http://127.0.0.1:*")


def content_policy(cloud: str | None) -> str:
    """The page's Content-Security-Policy: it may load its own files, and connect to any https address, this
    machine and `cloud`. WebAssembly may be compiled, JavaScript may not be made of text.
    """
    connect = ["'self'", "https:", *LOOPBACK, *([origin_of(cloud)] if cloud else [])]
    return (
        "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data:; "
        f"worker-src 'self' blob:; connect-src {' '.join(connect)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def origin_of(address: str) -> str:
    """Scheme, host and port of an http(s) address. Raises NearfarError for any other text."""
    wrong = NearfarError(
        f"{address!r} is not the address of a server: write it as http://host:8000 or https://host/v1"
    )
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", f":{parts.port}" if parts.port else ""
    except ValueError as error:
        raise wrong from error
    # The policy is text: no part of the address may end it or add to it.
    if parts.scheme not in ("http", "https") or not re.fullmatch(r"[\w.-]+|[\da-f:]+", host, re.ASCII):
        raise wrong
    return f"{parts.scheme}://{_shown_host(host)}{port}"


def find_page() -> Path:
    """Find the folder of the built chat page: inside the installed package, or in the checkout's web/dist."""
    package = Path(nearfar.__file__).resolve().parent
    candidates = [package / "web_dist" / "page", package.parents[1] / "web" / "dist" / "page"]
    for folder in candidates:
        if (folder / "index.html").is_file():
            return folder
    raise NearfarError(
        "the chat page is not built. In a checkout, run `make setup`, or `npm ci && npm run build` in web/; "
        "an installed package should contain it: reinstall nearfar from a release wheel"
    )


def _linked_files(artifact: Path) -> dict[str, Path]:
    """The real files behind the symbolic links that the manifest lists, by their path in the artifact.

    Caches such as Hugging Face's keep a folder of links to files elsewhere. Their targets are settled here,
    once: nothing that is put or relinked there later leads out of the artifact.
    """
    try:
        manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    linked = {}
    for name in {"manifest.json", *_listed(manifest)}:
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name:
            continue
        found = (artifact / relative).resolve()
        if found.is_file() and not found.is_relative_to(artifact.resolve()):
            linked[name] = found
    return linked


def _listed(value: object) -> Iterator[str]:
    """Yield every path in a manifest: the values of all keys `file`, `plan` and `library`."""
    if isinstance(value, list):
        for item in value:
            yield from _listed(item)
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("file", "plan", "library") and isinstance(item, str):
                yield item
            else:
                yield from _listed(item)


@dataclass
class Site:
    """Which file answers which path.

    `artifact`: one artifact, or several by their folders below /artifact/. `cloud`: the address that the page
    takes as its cloud, until told otherwise. `guarded`: the page has a Content-Security-Policy; benchmarks,
    which need other scripts, do without. `hosts`: names that it answers for in addition to this machine's;
    "*": any. `models`: the list of models.json (web/docs/clients.md); empty for a single model.
    """

    page: Path
    artifact: Path | Mapping[str, Path]
    cloud: str | None = None
    guarded: bool = True
    hosts: tuple[str, ...] = ()
    models: tuple[Mapping[str, object], ...] = ()
    _artifacts: dict[str, Path] = field(init=False)
    _linked: dict[str, Path] = field(init=False)
    _etags: dict[tuple[Path, int, int], str] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        given = {"": self.artifact} if isinstance(self.artifact, Path) else self.artifact
        self._artifacts = {f"{name}/" if name else "": path for name, path in given.items()}
        self._linked = {
            prefix + name: file
            for prefix, path in self._artifacts.items()
            for name, file in _linked_files(path).items()
        }

    def file(self, url_path: str) -> Path | None:
        """Find the file of an unquoted URL path. None for anything outside the page, the artifacts and the
        links that their manifests list.
        """
        if "\\" in url_path or "\0" in url_path:
            return None
        if url_path.startswith(ARTIFACT_PREFIX):
            relative = url_path.removeprefix(ARTIFACT_PREFIX)
            if (linked := self._linked.get(relative)) is not None:
                return linked if linked.is_file() else None
            prefix = next((each for each in self._artifacts if relative.startswith(each)), None)
            if prefix is None:
                return None
            root, relative = self._artifacts[prefix], relative.removeprefix(prefix)
        else:
            root, relative = self.page, url_path.removeprefix("/") or "index.html"
        root = root.resolve()
        found = (root / relative).resolve()
        # resolve() has removed every ".." and symbolic link, so the check holds for the file that is opened.
        return found if found.is_relative_to(root) and found.is_file() else None

    def told(self, url_path: str) -> bytes | None:
        """The page's settings as JSON; None where the path is a file's."""
        if url_path == CONFIG_PATH:
            return json.dumps({"cloud": self.cloud}).encode()
        if url_path == MODELS_PATH:
            return json.dumps({"models": self.models}).encode()
        if url_path.startswith(ARTIFACT_PREFIX) and (targets := self._below(url_path)):
            return json.dumps({"format": LISTING, "targets": targets}).encode()
        return None

    def _below(self, url_path: str) -> list[str]:
        """The artifacts in the folder whose manifest is requested, where the folder has none: the page need
        not find them by trial.
        """
        folder, _, name = url_path.removeprefix(ARTIFACT_PREFIX).rpartition("manifest.json")
        if name or folder in self._artifacts or (folder and not folder.endswith("/")):
            return []
        below = (each.removeprefix(folder) for each in self._artifacts if each.startswith(folder))
        return sorted(each.removesuffix("/") for each in below if each.count("/") == 1)

    def etag(self, path: Path) -> str:
        """The SHA-256 of a file, computed once for each version of it on the disk."""
        state = path.stat()
        key = (path, state.st_mtime_ns, state.st_size)
        with self._lock:
            known = self._etags.get(key)
        if known is None:
            with path.open("rb") as file:
                known = f'"{hashlib.file_digest(file, "sha256").hexdigest()}"'
            with self._lock:
                self._etags[key] = known
        return known


class PageServer(ThreadingHTTPServer):
    """Answers GET and HEAD from a Site, one thread a connection."""

    daemon_threads = True
    # On Unix this option means "reuse a port in TIME_WAIT"; on Windows it would share a port that another
    # server holds.
    allow_reuse_address = os.name != "nt"

    def __init__(self, host: str, port: int, site: Site) -> None:
        self.site = site
        self._hosts = answered_hosts(host, site.hosts)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The page's URL."""
        host, port = self.server_address[:2]
        return f"http://{_shown_host(str(host))}:{port}/"

    def answers_for(self, given: str | None) -> bool:
        """Whether a request's `Host` header names this server."""
        return answers_for(given, self._hosts)

    def handle_error(self, request: object, client_address: object) -> None:
        """Report an error, except where a browser closed its connection, as after an aborted load."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return bracketed(host)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "nearfar"
    # Closes idle keep-alive connections, which would otherwise hold a thread for ever.
    timeout = 60

    def do_GET(self) -> None:
        opened = self._begin()
        if opened is not None:
            with opened:
                shutil.copyfileobj(opened, self.wfile, 1 << 20)  # `_begin` has set the position

    def do_HEAD(self) -> None:
        opened = self._begin()
        if opened is not None:
            opened.close()

    def _begin(self) -> BinaryIO | None:
        """Send the status and headers; return the open file when a body is due."""
        if not self.server.answers_for(self.headers.get("Host")):
            self.send_error(
                HTTPStatus.MISDIRECTED_REQUEST,
                explain="Start `nearfar web` with --allowed-host for this name.",
            )
            return None
        asked = unquote(urlsplit(self.path).path)
        if (told := self.server.site.told(asked)) is not None:
            self._head(
                HTTPStatus.OK,
                {
                    "Content-Type": "application/json",
                    "Content-Length": str(len(told)),
                    "Cache-Control": "no-cache",
                },
            )
            return io.BytesIO(told)
        path = self.server.site.file(asked)
        if path is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        etag = self.server.site.etag(path)
        if etag in self.headers.get("If-None-Match", ""):
            self._head(HTTPStatus.NOT_MODIFIED, {"ETag": etag})
            return None
        file = path.open("rb")
        guessed = (
            MIME_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        )
        # "no-cache" means: keep the file, but ask each time whether it changed. A rebuilt artifact is
        # seen at once.
        size = path.stat().st_size
        headers = {"Content-Type": guessed, "ETag": etag, "Cache-Control": "no-cache"}
        start = self._range_start(size, etag)
        if start is None:
            self._head(HTTPStatus.OK, headers | {"Content-Length": str(size), "Accept-Ranges": "bytes"})
            return file
        part = {"Content-Length": str(size - start), "Content-Range": f"bytes {start}-{size - 1}/{size}"}
        self._head(HTTPStatus.PARTIAL_CONTENT, headers | part)
        file.seek(start)
        return file

    def _range_start(self, size: int, etag: str) -> int | None:
        """The first requested byte for a request of the rest of a file (`Range: bytes=N-`); None for the
        whole file.

        Resumed downloads send this form. A server may answer all other ranges with the whole file (RFC 9110,
        14.2).
        """
        asked = re.fullmatch(r"bytes=(\d{1,15})-", self.headers.get("Range", ""), re.ASCII)
        if self.command != "GET" or asked is None or self.headers.get("If-Range", etag) != etag:
            return None
        start = int(asked[1])
        return start if start < size else None

    def _head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def end_headers(self) -> None:
        """Add the headers of isolation and of the page's policy to every answer, also to errors."""
        site = self.server.site
        policy = {"Content-Security-Policy": content_policy(site.cloud)} if site.guarded else {}
        for name, value in {**ISOLATION, **policy}.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent: the terminal belongs to the person who started the server."""


def open_server(host: str, port: int, site: Site, attempts: int = 20) -> PageServer:
    """Listen at `port`, or at one of the next ports where that one is taken; port 0 takes any free one."""
    last = min(port + attempts, 65536)
    for candidate in range(port, last) if port else (0,):
        try:
            return PageServer(host, candidate, site)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise NearfarError(
                    f"cannot listen on {host}:{candidate}: {error.strerror or error}"
                ) from error
    raise NearfarError(f"the ports {port} to {last - 1} are all taken on {host}: choose another with --port")
