"""The file of private marks that a client keeps between starts: hashes under this user's key, one addition
per line.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nearfar.errors import RequestError
from nearfar.folders import write_whole
from nearfar.machine import key_for
from nearfar.routing.store import private

log = logging.getLogger(__name__)

MARK_BYTES = 8
VERSION = 1
LINES, BYTES = 1000, 4 << 20
"""Lines and bytes from which a file is rewritten when it is opened. The kept marks take less than half of
that size.
"""


@dataclass(frozen=True)
class MarkAddition:
    """The contents of one addition: ids of conversations, marks of whole texts, marks of windows."""

    conversations: tuple[str, ...] = ()
    texts: tuple[bytes, ...] = ()
    windows: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.conversations or self.texts or self.windows)


class MarksFile:
    """An append-only file beside the state. It has no text: marks are hashes under a key in another file
    (`nearfar.machine`), so the file alone cannot show whether a text was private.
    """

    def __init__(self, path: Path | None) -> None:
        key = key_for("private texts") if path is not None else None
        if path is not None and key is None:
            log.warning("private texts are kept in memory only: a restart forgets them")
        self.key = secrets.token_bytes(32) if key is None else key
        self.path = None if key is None else path
        self.worn = False

    def load(self) -> list[MarkAddition]:
        """Return the additions, in order. Raises RequestError where the file cannot be read, since privacy
        depends on it. Marks under another key are left out, and so is an incomplete last line; then the file
        is `worn` and must be renewed before anything is added.
        """
        if self.path is None or not self.path.exists():
            return []
        try:
            *whole, cut = self.path.read_text(encoding="utf-8").split("\n")
            head, *lines = map(json.loads, whole or [self._head()])
            if head["version"] != VERSION:
                raise ValueError(f"version {head['version']!r}")
            known = [*map(_read, lines)]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError(
                f"{self.path} does not say what was private ({error}); move it away to forget that"
            ) from error
        if other := head.get("key") != self._name():
            log.warning("%s has marks under another key: only conversations are known again", self.path)
            known = [MarkAddition(each.conversations) for each in known]
        self.worn = bool(other or cut or len(lines) > LINES or self.path.stat().st_size > BYTES)
        return known

    def add(self, *known: MarkAddition) -> None:
        """Append marks. They are in the file when this returns, even if the process ends."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with private(self.path) as file:
                if file.tell() == 0:
                    file.write(self._head())
                file.write("".join(map(_line, known)))
        except OSError as error:
            log.warning("%s cannot be written, and a restart forgets what is private: %s", self.path, error)

    def renew(self, known: MarkAddition) -> None:
        """Rewrite the whole file with all kept marks."""
        if self.path is None:
            return
        try:
            write_whole(self.path, (self._head() + (_line(known) if known else "")).encode())
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error)

    def _name(self) -> str:
        """The key's name, which does not reveal the key."""
        return blake2b(b"name", key=self.key, digest_size=MARK_BYTES).hexdigest()

    def _head(self) -> str:
        return json.dumps({"version": VERSION, "key": self._name()}) + "\n"


def _read(line: dict[str, Any]) -> MarkAddition:
    names = tuple(str(name) for name in line.get("conversations", ()))
    return MarkAddition(names, _marks(line.get("texts", "")), _marks(line.get("windows", "")))


def _marks(packed: str) -> tuple[bytes, ...]:
    data = base64.b64decode(packed, validate=True)
    if len(data) % MARK_BYTES:
        raise ValueError("half a mark")
    return tuple(data[at : at + MARK_BYTES] for at in range(0, len(data), MARK_BYTES))


def _line(known: MarkAddition) -> str:
    packed = {
        name: base64.b64encode(b"".join(marks)).decode()
        for name, marks in (("texts", known.texts), ("windows", known.windows))
        if marks
    }
    names = {"conversations": known.conversations} if known.conversations else {}
    return json.dumps({**names, **packed}) + "\n"
