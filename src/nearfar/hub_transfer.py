"""Large files of the hub into its client's cache: a download that is watched, stopped and gone on with.

The client itself (huggingface_hub 1.33) throws a file away whose download is stopped, waits for its threads
at Ctrl-C, and shows bars of its own. What is fetched here lies where it looks for it: `blobs/ETAG` of the
repository's folder, until it is whole `ETAG.incomplete`, under the client's own lock.
"""

from __future__ import annotations

import errno
import hashlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nearfar.errors import CheckpointError
from nearfar.interruptible import Stopped, side_by_side

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

SECONDS = 20.0
"""Seconds that the hub may be silent."""
TRIES, PAUSE = 4, 0.5
"""The second try comes after so many seconds, each further one after twice as long."""
AT_ONCE = 4
SHA256 = re.compile(r"[0-9a-f]{64}")
"""The entity tag of a large file; that of a small one is git's, of more than its bytes."""


@dataclass(frozen=True)
class Fetched:
    """How far a download is: bytes of the file that just got some, and of all; bytes a second of this run."""

    file: str
    done: int
    total: int
    all_done: int
    all_total: int
    rate: float


class Transfer:
    """Files of one repository, several at once."""

    def __init__(
        self,
        repository: str,
        folder: Path,
        files: Sequence[DryRunFileInfo],
        told: Callable[[Fetched], None] | None,
    ) -> None:
        """`folder`: the repository's in the client's cache."""
        self._repository, self._folder = repository, folder
        self._files, self._told = files, told
        self._there: dict[str, int] = {}
        self._total = sum(file.file_size or 0 for file in files)
        self._got, self._begun = 0, time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, stop: threading.Event | None = None) -> None:
        """Until all are there. Ctrl-C and `stop` end it at once; what has arrived stays."""
        side_by_side(self._fetch, self._files, AT_ONCE, self._stop, stop)

    def _fetch(self, file: DryRunFileInfo) -> None:
        from httpx import HTTPError

        pause = PAUSE
        for tries in range(1, TRIES + 1):
            try:
                self._try(file)
                return
            except (HTTPError, OSError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                    raise CheckpointError(
                        f"{self._folder} cannot be written: {error.strerror}. Free some space, or let "
                        "HF_HOME name a folder on another disk; the same command then goes on where it ended"
                    ) from error
                status = getattr(getattr(error, "response", None), "status_code", 500)
                if tries == TRIES or (status < 500 and status not in (408, 416, 429)):
                    raise
            if self._stop.wait(pause):
                raise Stopped
            pause *= 2

    def _try(self, file: DryRunFileInfo) -> None:
        """One try to have the rest of a file."""
        from filelock import FileLock
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # its documented place

        url = hf_hub_url(self._repository, file.filename, revision=file.commit_hash)
        known = get_hf_file_metadata(url)
        if known.etag is None:
            raise CheckpointError(
                f"{urlsplit(url).netloc} gives {file.filename} no entity tag (ETag), by which files are "
                "kept and gone on with: let HF_ENDPOINT name the hub, or a mirror that passes ETag on"
            )
        headers = build_hf_headers()
        if urlsplit(known.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # it is the hub's, not its storage's
        blob = self._folder / "blobs" / known.etag
        lock = self._folder.parent / ".locks" / self._folder.name / f"{known.etag}.lock"
        for path in (blob, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if blob.exists():
                return
            part = blob.with_name(f"{blob.name}.incomplete")
            resumed = part.exists()
            self._receive(known.location, headers, part, file, known.size)
            if resumed and SHA256.fullmatch(blob.name) and _sha256(part) != blob.name:
                part.unlink()  # its beginning was of something else
                raise ConnectionError(f"{file.filename} is not what the hub says it is")
            part.replace(blob)

    def _receive(
        self, url: str, headers: dict[str, Any], part: Path, file: DryRunFileInfo, size: int | None
    ) -> None:
        from huggingface_hub import get_session
        from huggingface_hub.errors import HfHubHTTPError

        have = part.stat().st_size if part.exists() else 0
        if have == size:
            return
        asked = {**headers, "accept-encoding": "identity", **({"range": f"bytes={have}-"} if have else {})}
        with get_session().stream("GET", url, headers=asked, timeout=SECONDS) as answer:
            if answer.status_code == 416:  # it has fewer bytes than lie here
                part.unlink(missing_ok=True)
            if answer.status_code >= 400:
                raise HfHubHTTPError(f"{url.partition('?')[0]}: {answer.status_code}", response=answer)
            going_on = answer.headers.get("content-range", "").startswith(f"bytes {have}-")
            at = have if answer.status_code == 206 and going_on else 0
            with part.open("ab" if at else "wb", buffering=0) as out:
                self._count(file, at, 0)
                for chunk in answer.iter_raw():
                    if self._stop.is_set():
                        raise Stopped
                    out.write(chunk)
                    at += len(chunk)
                    self._count(file, at, len(chunk))
        if size is not None and at != size:
            raise ConnectionError(f"the connection ended after {at:,} of {size:,} bytes")

    def _count(self, file: DryRunFileInfo, there: int, got: int) -> None:
        with self._lock:
            self._there[file.filename] = there
            self._got += got
            rate = self._got / max(time.monotonic() - self._begun, 1e-3)
            if self._told is not None:
                done = sum(self._there.values())
                self._told(Fetched(file.filename, there, file.file_size or 0, done, self._total, rate))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
