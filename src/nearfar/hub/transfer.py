"""Downloads large files of the hub into its client's cache, with progress, Ctrl-C and resumption.

The client itself (huggingface_hub 1.33) deletes a file whose download is stopped, waits for its threads at
Ctrl-C, and shows its own bars. Files are written where the client looks for them, under its own lock:
`blobs/ETAG` of the repository's folder, with the name `ETAG.incomplete` until they are complete.
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nearfar.downloads import SECONDS, Receiver, Reply
from nearfar.errors import CheckpointError
from nearfar.interruptible import side_by_side

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

AT_ONCE = 4
SHA256 = re.compile(r"[0-9a-f]{64}")
"""The entity tag of a large file; a small file has git's hash, which covers more than its bytes."""


@dataclass(frozen=True)
class Fetched:
    """The progress of a download: bytes of the file that just got some, bytes of all files, and bytes a
    second in this run.
    """

    file: str
    done: int
    total: int
    all_done: int
    all_total: int
    rate: float


class Transfer:
    """A download of files of one repository, several at once."""

    def __init__(
        self,
        repository: str,
        folder: Path,
        files: Sequence[DryRunFileInfo],
        told: Callable[[Fetched], None] | None,
    ) -> None:
        """`folder`: the repository's folder in the client's cache."""
        self._repository, self._folder = repository, folder
        self._files, self._told = files, told
        self._there: dict[str, int] = {}
        self._total = sum(file.file_size or 0 for file in files)
        self._got, self._begun = 0, time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._receiver = Receiver(self._stop, CheckpointError, "HF_HOME")

    def run(self, stop: threading.Event | None = None) -> None:
        """Download all files. Ctrl-C and `stop` end it at once; received bytes are kept."""
        side_by_side(self._fetch, self._files, AT_ONCE, self._stop, stop)

    def _fetch(self, file: DryRunFileInfo) -> None:
        from httpx import HTTPError

        self._receiver.persist(lambda: self._try(file), self._folder, (HTTPError, OSError))

    def _try(self, file: DryRunFileInfo) -> None:
        """Try once to download the rest of a file."""
        from filelock import FileLock
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # its documented place

        url = hf_hub_url(self._repository, file.filename, revision=file.commit_hash)
        known = get_hf_file_metadata(url)
        if known.etag is None:
            raise CheckpointError(
                f"{urlsplit(url).netloc} gives {file.filename} no entity tag (ETag), which stored and "
                "resumed downloads need: set HF_ENDPOINT to the hub, or to a mirror that passes ETag on"
            )
        headers = build_hf_headers()
        if urlsplit(known.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # the key is for the hub, not for its storage
        blob = self._folder / "blobs" / known.etag
        lock = self._folder.parent / ".locks" / self._folder.name / f"{known.etag}.lock"
        for path in (blob, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if blob.exists():
                return
            part = blob.with_name(f"{blob.name}.incomplete")
            resumed = part.exists()
            self._receiver.receive(
                file.filename,
                lambda start: _asked(known.location, headers, start),
                part,
                known.size,
                sys.maxsize if known.size is None else known.size,
                lambda there, got: self._count(file, there, got),
            )
            if known.size not in (None, part.stat().st_size):
                raise ConnectionError(f"{file.filename} should have {known.size:,} bytes")
            if resumed and SHA256.fullmatch(blob.name) and _sha256(part) != blob.name:
                part.unlink()  # the beginning belonged to another file
                raise ConnectionError(f"{file.filename} is not what the hub says it is")
            part.replace(blob)

    def _count(self, file: DryRunFileInfo, there: int, got: int) -> None:
        with self._lock:
            self._there[file.filename] = there
            self._got += got
            rate = self._got / max(time.monotonic() - self._begun, 1e-3)
            if self._told is not None:
                done = sum(self._there.values())
                self._told(Fetched(file.filename, there, file.file_size or 0, done, self._total, rate))


@contextmanager
def _asked(url: str, headers: Mapping[str, str], start: int) -> Iterator[Reply]:
    """Request a file from the hub's storage, from a byte offset on."""
    from huggingface_hub import get_session

    asked = {**headers, "accept-encoding": "identity", **({"range": f"bytes={start}-"} if start else {})}
    with get_session().stream("GET", url, headers=asked, timeout=SECONDS) as answer:
        length = answer.headers.get("content-length")
        yield Reply(
            answer.status_code,
            answer.reason_phrase,
            answer.headers.get("content-range", ""),
            None if length is None else int(length),
            answer.iter_raw(),
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
