"""The state that a hybrid client keeps between starts, and its decision records."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from nearfar.errors import RequestError
from nearfar.folders import write_whole

log = logging.getLogger(__name__)

VERSION = 2
"""Version of the state. Version 1 contained the ids of private conversations, which are in a separate file
now: a nearfar that does not know that file must not accept the state.
"""


def private(path: Path) -> TextIO:
    """Open a file to append to it. A new one is readable by its owner only: it shows who requested what, and
    when.
    """
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")


class StateFile:
    """A small JSON file: costs, the calibrated threshold, measured speeds. One process at a time owns it.

    A file that cannot be read is an error, since budgets depend on it; one that cannot be written is logged.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def load(self) -> dict[str, Any]:
        """Return the content; empty where there is no file yet. Raises RequestError for an unreadable
        file.
        """
        if self.path is None or not self.path.exists():
            return {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["version"] not in (1, VERSION):
                raise ValueError(f"version {data['version']!r}")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RequestError(
                f"{self.path} is not a routing state that this nearfar can read ({error}); move it away"
            ) from error
        return dict(data)

    def save(self, content: Mapping[str, Any]) -> None:
        """Replace the file's content."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps({"version": VERSION, **content}).encode())
        except OSError as error:
            log.warning("the routing state %s cannot be written: %s", self.path, error)


class StateWriter:
    """Writes the state in the background: a change at once, and changes during a write together after it.
    With a thousand conversations a write took 0.76 s, during which no answer could continue.
    """

    def __init__(self, file: StateFile, content: Callable[[], Mapping[str, Any]]) -> None:
        self._file, self._content = file, content
        self._changes = self._written = 0
        self._one = threading.Lock()
        self._task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """Schedule a write of the changed state."""
        self._changes += 1
        if self._file.path is None or (self._task is not None and not self._task.done()):
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the loop of a dropped answer has ended
            self._save(self._changes, self._content())
        else:
            self._task = loop.create_task(self._write())
            self._task.add_done_callback(self._ended)

    async def settled(self) -> None:
        """Write the present state, and wait until it is on the disk, as far as it can be written."""
        self.changed()
        wanted = self._changes
        while self._task is not None and self._written < wanted:
            await asyncio.shield(self._task)
            if self._written < wanted:
                self.changed()

    async def _write(self) -> None:
        while self._written < self._changes:
            await asyncio.to_thread(self._save, self._changes, self._content())

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # the loop ended without a call of close()
            self._save(self._changes, self._content())

    def _save(self, changes: int, content: Mapping[str, Any]) -> None:
        """Write the content after `changes` changes, but never over later content."""
        with self._one:
            if changes > self._written:
                self._file.save(content)
                self._written = changes


class Records:
    """Decision records, one JSON object per line. A line that cannot be written is logged, and no answer
    fails for it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with private(self.path) as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("the decision record %s cannot be written: %s", self.path, error)
