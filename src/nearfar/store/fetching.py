"""Downloads an artifact from a URL on any static host: the files that its manifest lists.

Files are kept in `.downloading` of the model's folder until all are complete and checked. An interrupted
download continues there, in the middle of a file if the host supports ranges.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import Request, urlopen

from nearfar import strict_json
from nearfar.downloads import SECONDS, Receiver, Refused, Reply, may_pass
from nearfar.edge_runtime.artifact.finder import MANIFEST
from nearfar.edge_runtime.artifact.reader import Artifact, Expected
from nearfar.errors import ArtifactError, StoreError
from nearfar.folders import HOME
from nearfar.format.manifest import LISTING
from nearfar.hub.reach import cause_of
from nearfar.interruptible import side_by_side
from nearfar.room import lacking

Told = Callable[[int, int], None]
"""Callback that gets the received bytes and all bytes."""

ASIDE = ".downloading"
AT_ONCE = 6
CHUNK = 1 << 18
MOST_MANIFEST, MOST_UNSTATED = 1 << 26, 1 << 28
"""The most bytes of a manifest, and of a file whose size the manifest does not say: a kernel, a plan."""


def is_url(given: str) -> bool:
    """Whether a given text is a URL rather than a path or a name."""
    return given.lower().startswith(("http://", "https://"))


def address_of(given: str) -> str:
    """The URL of an artifact's folder, with a slash at its end, from the URL of the folder or of its
    manifest. Raises StoreError for a URL to which no file name can be added.
    """
    parts = _split(given)
    path = parts.path.removesuffix(MANIFEST).rstrip("/")
    return f"{parts.scheme.lower()}://{parts.netloc}{path}/"


def name_of(address: str, targets: Sequence[str]) -> str:
    """A name for the model at a URL: the last specific part of its path."""
    parts = _split(address)
    words = [word for word in parts.path.split("/") if word]
    telling = [word for word in words if word not in (*targets, "artifact")]
    return telling[-1] if telling else str(parts.hostname)


def _split(given: str) -> SplitResult:
    try:
        parts = urlsplit(given)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise StoreError(f"{given} is not an address ({error})") from error
    if not host or any(letter.isspace() for letter in given):
        raise StoreError(f"{given} is not an address: give https://host/path/ of an artifact's folder")
    if parts.username or parts.password:
        raise StoreError(
            f"the address of {host} contains a name or a password, which the store would keep: leave it out"
        )
    if parts.query or parts.fragment:
        raise StoreError(
            f"{given} has a ?query or a #fragment, which does not fit the artifact's other files: give "
            "https://host/path/ of its folder"
        )
    return parts


def fetch(address: str, into: Path, targets: Sequence[str], told: Told) -> Path:
    """Download the artifact at a URL, or the artifact of the first of `targets` from a sub-folder with the
    target's name, as a build writes it; gives its folder, `into`/TARGET.

    Raises StoreError where there is none for these targets, the host fails or the disk has no room;
    ArtifactError where a file differs from the manifest.
    """
    where, text = _manifest(address, targets)
    aside = into / ASIDE / "artifact"
    aside.mkdir(parents=True, exist_ok=True)
    (aside / MANIFEST).write_bytes(text)
    try:
        artifact = Artifact.open(aside)
        if artifact.target not in targets:
            raise StoreError(
                f"{where} is for {artifact.target}, not for {', '.join(targets)}: give the address of one "
                "for these, or another --device"
            )
    except (ArtifactError, StoreError) as error:
        shutil.rmtree(into / ASIDE, ignore_errors=True)
        raise type(error)(str(error).replace(f"{aside}/", where).replace(str(aside), where)) from error
    download = _Download(where, artifact, told)
    if lack := lacking(into, download.missing):
        raise StoreError(
            f"the download of {where} {lack}: free some space (nearfar list, nearfar rm NAME), or set {HOME} "
            "to a folder on another disk"
        )
    download.run()
    place = into / artifact.target
    shutil.rmtree(place, ignore_errors=True)
    aside.rename(place)
    shutil.rmtree(into / ASIDE, ignore_errors=True)
    return place


def _manifest(address: str, targets: Sequence[str]) -> tuple[str, bytes]:
    """The URL of the artifact's folder, and its manifest."""
    pages: dict[str, str] = {}
    for where in (address, *(urljoin(address, f"{target}/") for target in targets)):
        try:
            with _open(urljoin(where, MANIFEST)) as answer:
                text, kind = answer.read(MOST_MANIFEST + 1), answer.headers.get_content_type()
        except HTTPError as error:
            if error.code in (403, 404, 410):
                continue
            raise StoreError(f"{where}{MANIFEST}: the host answers {error.code} {error.reason}") from error
        except (OSError, HTTPException) as error:
            raise StoreError(
                f"{_unreached(where + MANIFEST, error)}: check the address and the network"
            ) from error
        if len(text) > MOST_MANIFEST:
            raise StoreError(f"{where}{MANIFEST} is longer than any manifest ({MOST_MANIFEST:,} bytes)")
        if (page := _no_json(text)) is not None:
            pages.setdefault(f"{where}{MANIFEST}", f"{page} ({kind})")
        elif not _is_listing(text):
            return where, text
    for url, page in pages.items():  # some sites answer every URL with their front page
        raise StoreError(
            f"{url} gives {page}, not the manifest of an artifact: check the address; give that of a folder "
            "that nearfar build wrote"
        )
    raise StoreError(
        f"{address} has no {MANIFEST}, neither there nor in {', '.join(targets)} below: give the address of "
        "a folder that nearfar build wrote, for a target that this machine runs"
    )


def _no_json(text: bytes) -> str | None:
    """Describe a text that is not a JSON object; None for an object."""
    begun = text[:1024].lstrip().lower()
    if begun.startswith(b"{"):
        return None
    return "a web page" if begun.startswith((b"<!doctype html", b"<html")) else "something else"


def _is_listing(text: bytes) -> bool:
    """Whether a server (nearfar web) lists a folder's targets in place of a missing manifest."""
    if LISTING.encode() not in text:  # a quick test comes first, because manifests are long
        return False
    try:
        read = strict_json.loads(text)
    except ValueError:
        return False
    return isinstance(read, dict) and read.get("format") == LISTING


class _Download:
    """A download of the files of one artifact, several at once."""

    def __init__(self, address: str, artifact: Artifact, told: Told) -> None:
        self._address = address
        self._artifact = artifact
        self._told = told
        self._files = list({each.file: each for each in artifact.files()}.values())
        self._total = sum(each.bytes or 0 for each in self._files)
        self._there = {each.file: self._length(each) for each in self._files}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._receiver = Receiver(self._stop, StoreError, HOME)

    @property
    def missing(self) -> int:
        """Bytes that are still missing."""
        return self._total - sum(self._there.values())

    def run(self) -> None:
        """Download all files and check each against the manifest."""
        side_by_side(self._fetch, self._files, AT_ONCE, self._stop)

    def _fetch(self, expected: Expected) -> None:
        file, part = self._artifact.path / expected.file, self._part(expected)
        if self._artifact.problem(expected) is None:
            return
        file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        goes_on = part.exists()
        problem = self._checked(expected, file, part)
        if problem and goes_on:  # the local beginning belonged to another version of the file
            file.unlink()
            problem = self._checked(expected, file, part)
        if problem:
            file.unlink()
            raise ArtifactError(
                f"{self._address}: {problem}. The host's file does not match its manifest: tell the owner of "
                "the host"
            )

    def _checked(self, expected: Expected, file: Path, part: Path) -> str | None:
        """Receive a file; gives what is wrong with it, or None."""
        url = urljoin(self._address, expected.file)
        try:
            self._receiver.persist(
                lambda: self._receive(url, part, expected), part.parent, (OSError, HTTPException)
            )
        except Refused as error:
            if may_pass(error):
                raise self._given_up(url, error) from error
            raise StoreError(f"{url}: {error}") from error
        except (OSError, HTTPException) as error:
            raise self._given_up(url, error) from error
        part.replace(file)
        return self._artifact.problem(expected)

    def _receive(self, url: str, part: Path, expected: Expected) -> None:
        self._receiver.receive(
            url,
            lambda start: _asked(url, start),
            part,
            expected.bytes,
            MOST_UNSTATED if expected.bytes is None else expected.bytes,
            lambda there, _: self._count(expected, there),
        )

    def _given_up(self, url: str, error: Exception) -> StoreError:
        return StoreError(
            f"{_unreached(url, error)}: what has arrived is kept, the same command continues the download"
        )

    def _count(self, expected: Expected, there: int) -> None:
        with self._lock:
            self._there[expected.file] = there if expected.bytes is not None else 0
            self._told(sum(self._there.values()), self._total)

    def _length(self, expected: Expected) -> int:
        """The number of received bytes of a file; 0 where its size is unknown."""
        for path in (self._artifact.path / expected.file, self._part(expected)):
            if expected.bytes is not None and path.is_file():
                return min(path.stat().st_size, expected.bytes)
        return 0

    def _part(self, expected: Expected) -> Path:
        """The path of a file until it is complete: no artifact's file name begins with a dot."""
        path = self._artifact.path / expected.file
        return path.with_name(f".{path.name}.part")


def _open(url: str, start: int = 0) -> HTTPResponse:
    """Request a file, from a byte offset on; the caller closes the response."""
    headers = {"User-Agent": "nearfar", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    answer: HTTPResponse = urlopen(Request(url, headers=headers), timeout=SECONDS)
    return answer


@contextmanager
def _asked(url: str, start: int) -> Iterator[Reply]:
    """Request a file from a host, from a byte offset on."""
    try:
        answer = _open(url, start)
    except HTTPError as error:
        yield Reply(error.code, error.reason)
        return
    with answer:
        length = answer.headers["Content-Length"]
        yield Reply(
            answer.status,
            answer.reason,
            answer.headers["Content-Range"] or "",
            int(length) if length else None,
            iter(lambda: answer.read1(CHUNK), b""),
        )


def _unreached(url: str, error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    return f"{url} cannot be fetched ({cause_of(reason) if isinstance(reason, Exception) else reason})"
