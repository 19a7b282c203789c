"""Runs a command in a pseudo-terminal, and gives what a person would see."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte

COLUMNS, LINES = 80, 24
PASTE = "\x1b[200~{}\x1b[201~"
"""A bracketed paste, as terminals send it."""


class Terminal:
    """Runs `nearfar` with these arguments. `raw`: everything that it wrote, escapes included."""

    def __init__(
        self, *arguments: object, home: Path, program: str = sys.executable, **environment: str
    ) -> None:
        words = (
            ["-m", "nearfar", *map(str, arguments)] if program == sys.executable else [*map(str, arguments)]
        )
        settings = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "CI")
        }
        settings |= {"TERM": "xterm-256color", "NEARFAR_HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1"}
        self._child = pexpect.spawn(
            program, words, env=settings | environment, dimensions=(LINES, COLUMNS), timeout=60
        )
        self._screen = pyte.HistoryScreen(COLUMNS, LINES, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close(force=True)

    @property
    def lines(self) -> list[str]:
        """The lines on the screen and above it, without trailing blanks."""
        above = ["".join(row[x].data for x in range(COLUMNS)) for row in self._screen.history.top]
        return [line.rstrip() for line in (*above, *self._screen.display)]

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines).rstrip()

    def send(self, keys: str) -> None:
        """Press keys."""
        self._child.send(keys)

    def until(self, seen: Callable[[str], bool] | str, limit: float = 30.0) -> str:
        """Wait until the text contains `seen`, or until `seen` accepts it."""
        wanted = seen if callable(seen) else lambda text: seen in text
        end = time.monotonic() + limit
        while not wanted(self.text):
            assert time.monotonic() < end, f"not seen: {seen!r}\n{self.text}"
            self._read(0.1)
        return self.text

    def end(self) -> int:
        """Wait for the command to end; gives the exit code."""
        while self._read(60.0):
            pass
        self._child.close()
        return int(
            self._child.exitstatus if self._child.exitstatus is not None else -self._child.signalstatus
        )

    def _read(self, seconds: float) -> bool:
        try:
            data = self._child.read_nonblocking(65536, seconds)
        except pexpect.TIMEOUT:
            return False
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True
