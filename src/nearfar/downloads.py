"""Resumable downloads, used for files of the hub and of artifacts at a URL."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from nearfar.errors import NearfarError
from nearfar.interruptible import Stopped

SECONDS = 20.0
"""Seconds that a host may be silent."""
TRIES = 4
PAUSE = 0.5
"""Seconds before the second try; each further pause is twice as long."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
PASSING = (408, 416, 429)
"""Status codes below 500 after which another try may succeed. 416: the local file was longer, and is deleted.
"""


@dataclass(frozen=True)
class Reply:
    """A host's answer to a request for a file from a byte offset on.

    `range`: its Content-Range, or an empty string. `length`: its Content-Length.
    """

    status: int
    reason: str = ""
    range: str = ""
    length: int | None = None
    chunks: Iterable[bytes] = ()


class Refused(ConnectionError):
    """The host answered with an error."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"the host answers {reply.status} {reply.reason}".rstrip())
        self.status = reply.status


@dataclass(frozen=True)
class Receiver:
    """Receives files until `stop` is set. `failure`: the class of errors that the user can fix. `home`: the
    environment variable that names the folder of the downloads.
    """

    stop: threading.Event
    failure: type[NearfarError]
    home: str

    def persist(self, attempt: Callable[[], None], folder: Path, errors: tuple[type[Exception], ...]) -> None:
        """Try until an attempt succeeds, TRIES times at most.

        Raises the last of `errors`, or the first one that another try would not change.
        """
        pause = PAUSE
        for tries in range(1, TRIES + 1):
            try:
                attempt()
                return
            except errors as error:
                if isinstance(error, OSError) and error.errno in UNWRITABLE:
                    raise self.failure(
                        f"{folder} cannot be written: {error.strerror}. Free some space, or set {self.home} "
                        "to a folder on another disk; the same command then continues the download"
                    ) from error
                if tries == TRIES or not may_pass(error):
                    raise
            if self.stop.wait(pause):
                raise Stopped
            pause *= 2

    def receive(
        self,
        name: str,
        ask: Callable[[int], AbstractContextManager[Reply]],
        part: Path,
        size: int | None,
        most: int,
        told: Callable[[int, int], None],
    ) -> None:
        """Append the missing bytes of a file to `part`, or rewrite it where the host sends the whole file.

        `name` is for messages; `ask` requests the file from a byte offset on. `size`: the file's size, if
        known. `most`: the most bytes that it may have. `told` gets the bytes in the file and those that have
        just arrived.
        """
        have = part.stat().st_size if part.exists() else 0
        if have == size:
            return
        if have > most:  # the file is the beginning of another version
            part.unlink()
            have = 0
        with ask(have) as reply:
            wrong = reply.status == 206 and not reply.range.startswith(f"bytes {have}-")
            if wrong or reply.status == 416:
                part.unlink(missing_ok=True)
            if reply.status >= 400:
                raise Refused(reply)
            if wrong:
                raise ConnectionError("the host sent another range than was requested")
            at = have if reply.status == 206 else 0
            end = size if reply.length is None else at + reply.length
            with part.open("ab" if at else "wb", buffering=0) as out:
                told(at, 0)
                for chunk in reply.chunks:
                    if self.stop.is_set():
                        raise Stopped
                    if at + len(chunk) > most:
                        raise self.failure(f"{name} has more than the {most:,} bytes that are allowed")
                    out.write(chunk)
                    at += len(chunk)
                    told(at, len(chunk))
        if end is not None and at < end:
            raise ConnectionError(f"the connection ended after {at:,} of {end:,} bytes")


def may_pass(error: Exception) -> bool:
    """Whether another try may succeed after this error."""
    response = getattr(error, "response", None)  # httpx's errors have a response; the hub's client uses httpx
    status = error.status if isinstance(error, Refused) else getattr(response, "status_code", 500)
    return status >= 500 or status in PASSING
