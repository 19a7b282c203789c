"""Records the fields that the server ignores, for the client (header `x-nearfar-ignored`) and the log.

Unknown fields are ignored, unless the server is strict (`--strict-fields`). Where an upstream gets the
request as received, unknown fields are passed on, and the upstream says which it ignored.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextvars import ContextVar

from fastapi import Request

from nearfar.errors import RequestError
from nearfar.remote.server import IGNORED_HEADER

log = logging.getLogger(__name__)

HEADER = IGNORED_HEADER
NAMED = 16
"""Most fields that an answer's header names; further ones are counted."""
HEADER_CHARS = 2048
"""Most characters that are read of an upstream's header."""
LONGEST = 64
"""Longest name of a field or a client that is shown, in characters."""
TOLD = 1024
"""Most lines in the log: the names come from clients, who can invent any number of them."""

_COUNTED = re.compile(r"and (\d{1,9}) more", re.ASCII)
_PLAIN = re.compile(r"[\w.:@/?\[\]-]+", re.ASCII)
_VERSION = re.compile(r"/?\bv?\d[\w.+-]*")


class Ignored:
    """The ignored fields of one request, in the order in which they were found."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._met: set[str] = set()
        self._more = 0  # fields that an upstream counted and did not name

    def add(self, name: str) -> None:
        """Add a field, named with its place."""
        self._add(name if _PLAIN.fullmatch(name) else ascii(name))

    def add_header(self, value: str) -> None:
        """Add the fields that an upstream's header names."""
        for name in value[:HEADER_CHARS].split(", "):
            if counted := _COUNTED.fullmatch(name):
                self._more += int(counted[1])
            elif name:  # a name that can stand in a header is escaped already, where that was needed
                self._add(name if name.isascii() and name.isprintable() else ascii(name))

    def _add(self, name: str) -> None:
        if name in self._met:
            return
        self._met.add(name)
        if len(self.names) < NAMED:
            self.names.append(name[:LONGEST])

    @property
    def header(self) -> str:
        """The value of the header; "" where nothing was ignored."""
        rest = len(self._met) - len(self.names) + self._more
        return ", ".join(self.names) + (f", and {rest} more" if rest else "")


ignored: ContextVar[Ignored | None] = ContextVar("ignored", default=None)
"""The ignored fields of the request that is being validated; None where unknown fields are rejected."""
passes_on: ContextVar[bool] = ContextVar("passes_on", default=False)
"""Whether an upstream gets the request that is being validated as it was received: unknown fields, unless
they are rejected, and values that only the upstream can follow.
"""

computes: ContextVar[bool] = ContextVar("computes", default=True)
"""Whether this server computes the answer to the request that is being validated. Then images, sounds and
files are rejected; a server behind a front may read them.
"""


def names_of(request: Request) -> Ignored:
    """Return the names that the header of a request's answer will have."""
    found = request.state.ignored
    assert isinstance(found, Ignored)
    return found


def ignore(names: Sequence[str]) -> None:
    """Note fields without effect on the current request. Raises RequestError where the server is strict."""
    found = ignored.get()
    if found is None:
        raise RequestError(
            f"{names[0]}: this model's chat template has no variable for it, so it changes nothing; leave it "
            "out",
            names[0],
        )
    for name in names:
        found.add(name)


class IgnoredFieldLog:
    """Logs each field once for each kind of client."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, found: Ignored, agent: str) -> None:
        """Log the ignored fields. `agent`: the request's User-Agent."""
        kind = " ".join(_VERSION.sub(" ", agent[:200]).split())[:LONGEST] or "unknown"
        for name in found.names:
            if (name, kind) not in self._told and len(self._told) < TOLD:
                self._told.add((name, kind))
                log.info("ignored a field of a request", extra={"fields": {"field": name, "client": kind}})
