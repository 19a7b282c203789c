"""Reads questions of one or several lines, from a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import BinaryIO, Protocol

from nearfar.errors import RequestError

FENCE = '"""'
"""Begins and ends a text that is a question exactly as written, whatever its lines begin or end with."""
HOW = f"A line that ends in \\ goes on in the next; {FENCE} begins a text of several lines, and ends it."


class QuestionReader(Protocol):
    """A source of questions."""

    def read(self) -> str | None:
        """The next question, None at the end. KeyboardInterrupt where the person presses Ctrl-C instead."""
        ...


def fence_open(text: str) -> bool:
    """Whether a text begins with a fence that does not end yet."""
    begun = text.lstrip()
    return begun.startswith(FENCE) and not (len(begun) >= 2 * len(FENCE) and begun.rstrip().endswith(FENCE))


def fenced(text: str) -> bool:
    """Whether a text stands between fences."""
    return text.lstrip().startswith(FENCE) and not fence_open(text)


def without_fences(text: str) -> str:
    """The text between fences, without the line breaks next to them; a text without fences is unchanged."""
    if not fenced(text):
        return text
    return text.strip()[len(FENCE) : -len(FENCE)].removeprefix("\n").removesuffix("\n")


class Lines:
    """Questions from a pipe: a line each, or several where a line ends in a backslash or a fence is open."""

    def __init__(self, source: BinaryIO | None = None) -> None:
        self._source: Iterable[bytes] = iter(sys.stdin.buffer if source is None else source)
        self._number = 0

    def read(self) -> str | None:
        """The next question; a question that the end of the input cuts off counts, too."""
        text: str | None = None
        while (line := self._line()) is not None:
            text = line if text is None else text + line
            if fence_open(text):
                text += "\n"
            elif not fenced(text) and text.endswith("\\"):
                text = f"{text[:-1]}\n"
            else:
                return text
        return text

    def _line(self) -> str | None:
        line = next(iter(self._source), None)
        if line is None:
            return None
        self._number += 1
        try:
            return line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise RequestError(
                f"line {self._number} of stdin is not UTF-8: byte {error.start} is {line[error.start]:#04x}"
            ) from error
