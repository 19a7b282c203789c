"""Finds the end of JSON that arrives in pieces."""

from __future__ import annotations

import re

_INNER = re.compile(r'["{}\[\]]')
_QUOTED = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)


class Nesting:
    """The nesting depth of JSON text that arrives in pieces. Brackets in strings do not count."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """The index after the outermost closing bracket in this next piece; None if it is not in it."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while at < len(text):
            if self._quoted:
                at = self._through(text, at)
                continue
            found = _INNER.search(text, at)
            if found is None:
                return None
            at = found.end()
            if found[0] == '"':
                self._quoted = True
                continue
            self._depth += 1 if found[0] in "{[" else -1
            if self._depth == 0:
                return at
        return None

    def _through(self, text: str, at: int) -> int:
        """The index after the string that the text is in, or the end of the text."""
        found = _QUOTED.match(text, at)
        at = found.end() if found else at
        rest = text[at : at + 1]
        if rest == '"':
            self._quoted = False
        self._escaped = rest == "\\"  # the next piece begins behind a backslash
        return at + len(rest)
