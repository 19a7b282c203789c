"""Records the fields that the server ignores, for the client (header `x-nearfar-ignored`) and the log.

Unknown fields are ignored, unless the server is strict (`--strict-fields`). Where an upstream may know them,
they are passed on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextvars import ContextVar

from nearfar.errors import RequestError

log = logging.getLogger(__name__)

HEADER = "x-nearfar-ignored"
NAMED = 16
"""Most fields that an answer's header names; further ones are counted."""
LONGEST = 64
"""Longest name of a field or a client that is shown, in characters."""
TOLD = 1024
"""Most lines in the log: the names come from clients, who can invent any number of them."""

_PLAIN = re.compile(r"[\w.:@/-]+", re.ASCII)
_VERSION = re.compile(r"/?\bv?\d[\w.+-]*")


class Ignored:
    """The ignored fields of one request, in the order in which they were found."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._met: set[str] = set()

    def add(self, name: str) -> None:
        """Add a field, named with its place."""
        if name in self._met:
            return
        self._met.add(name)
        if len(self.names) < NAMED:
            self.names.append(name[:LONGEST] if _PLAIN.fullmatch(name) else ascii(name[:LONGEST])[:LONGEST])

    @property
    def header(self) -> str:
        """The value of the header; "" where nothing was ignored."""
        rest = len(self._met) - len(self.names)
        return ", ".join(self.names) + (f", and {rest} more" if rest else "")


ignored: ContextVar[Ignored | None] = ContextVar("ignored", default=None)
"""The ignored fields of the request that is being validated; None where unknown fields are rejected."""


passes_on: ContextVar[bool] = ContextVar("passes_on", default=False)
"""Whether fields that this server does not know are for the engine of the request that is being validated: an
upstream gets the request as received.
"""


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
