"""Fields that the server ignores: which they were, for the client (`x-nearfar-ignored`) and the log.

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
"""Fields that an answer's header names; the rest is counted."""
LONGEST = 64
"""Characters of a name, or of a client, that are told."""
TOLD = 1024
"""Lines that the log gets: names come from strangers, who can make up as many as they like."""

_PLAIN = re.compile(r"[\w.:@/-]+", re.ASCII)
_VERSION = re.compile(r"/?\bv?\d[\w.+-]*")


class Ignored:
    """What was ignored of one request, in the order in which it was met."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._met: set[str] = set()

    def add(self, name: str) -> None:
        """A field, with its place."""
        if name in self._met:
            return
        self._met.add(name)
        if len(self.names) < NAMED:
            self.names.append(name[:LONGEST] if _PLAIN.fullmatch(name) else ascii(name[:LONGEST])[:LONGEST])

    @property
    def header(self) -> str:
        """The value of the header; empty: nothing was ignored."""
        rest = len(self._met) - len(self.names)
        return ", ".join(self.names) + (f", and {rest} more" if rest else "")


ignored: ContextVar[Ignored | None] = ContextVar("ignored", default=None)
"""What is ignored of the request that is validated now; None where unknown fields are refused."""


passes_on: ContextVar[bool] = ContextVar("passes_on", default=False)
"""Whether what this server does not know itself is for the engine of the request that is validated now: an
upstream gets the request as it came.
"""


def ignore(names: Sequence[str]) -> None:
    """Note fields that change nothing of the request under way; RequestError where the server is strict."""
    found = ignored.get()
    if found is None:
        raise RequestError(
            f"this model's chat template knows no {names[0]}, so it would change nothing; leave it out",
            names[0],
        )
    for name in names:
        found.add(name)


class Teller:
    """Logs each field once for each kind of client."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, found: Ignored, agent: str) -> None:
        """`agent`: the request's User-Agent."""
        kind = " ".join(_VERSION.sub(" ", agent[:200]).split())[:LONGEST] or "unknown"
        for name in found.names:
            if (name, kind) not in self._told and len(self._told) < TOLD:
                self._told.add((name, kind))
                log.info("ignored a field of a request", extra={"fields": {"field": name, "client": kind}})
