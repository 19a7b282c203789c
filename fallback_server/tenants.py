"""A tenant: whom a request is answered for. It is made once, at the door, and travels with the request.

Every floor takes from it what is its own: admission the limits, the app the models, the scheduler the
priority, the caches (here, and upstream) the salt.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

MAX_PRIORITY = 1000
"""A request's priority is between this and its negative; smaller goes first."""


@dataclass(frozen=True)
class Limits:
    """Limits of a tenant per minute, and at once. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True)
class Tenant:
    """Who asks. Frozen, hashable, and small enough to travel between processes.

    `salt` is the root of all prefixes that it may find in a cache; "" is a root of its own, that of a single
    user. `models`: ids, or "*" for all. `priority` is the smallest, that is the most urgent, that it may ask
    for.
    """

    name: str
    salt: str = ""
    priority: int = 0
    limits: Limits = field(default_factory=Limits)
    models: tuple[str, ...] = ("*",)

    def allows(self, model: str) -> bool:
        """Whether the tenant may use a model."""
        return "*" in self.models or model in self.models

    def within(self, salt: str | None) -> Tenant:
        """The tenant with a part of its cache set apart by a salt of the client's. Nobody else can name
        that part.
        """
        return replace(self, salt=digest("client", self.salt, salt)) if salt else self


def digest(*parts: str) -> str:
    """A salt of several parts: 64 characters that tell none of them. Different parts never give the same
    one.
    """
    joined = b"".join(
        len(data := part.encode("utf-8", "surrogatepass")).to_bytes(8, "big") + data for part in parts
    )
    return hashlib.sha256(joined).hexdigest()


SHARE_SECONDS = 0.5
"""Seconds by which a sequence's place in line moves back for each sequence that its tenant has under way."""


class Shares:
    """Who stands where in an engine's line: behind its own tenant's sequences, but not behind all of them of
    another.

    Who comes with a hundred at once has his first before everybody who comes later, and his last half a
    minute behind. Nobody starves: how late one stands is bounded by what its tenant has under way. Among one
    tenant's the order is that of arrival.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def late(self, tenant: Tenant) -> float:
        """Count a sequence in; the seconds that it stands behind its arrival. `leave` when it has ended."""
        now, count = self._clock(), self._under_way.get(tenant.name, 0)
        place = max(now + SHARE_SECONDS * count, self._last.get(tenant.name, now))
        self._under_way[tenant.name], self._last[tenant.name] = count + 1, place
        return place - now

    def leave(self, tenant: Tenant, sequences: int) -> None:
        """`sequences` of the tenant's sequences have ended."""
        left = self._under_way.get(tenant.name, 0) - sequences
        if left > 0:
            self._under_way[tenant.name] = left
        else:
            self._under_way.pop(tenant.name, None)
            self._last.pop(tenant.name, None)


ANONYMOUS = Tenant("anonymous", priority=-MAX_PRIORITY)
"""Who asks a server that was started without keys: one tenant, however many people."""
