"""A tenant: the user, by key, whose request it is. It is made once, at authentication, and travels with the
request.

Each layer uses its own part of it: admission the limits, the app the models, the scheduler the priority, the
caches (here and upstream) the salt.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

MAX_PRIORITY = 1000
"""Bound of a request's priority, from -MAX_PRIORITY to MAX_PRIORITY; smaller goes first."""


@dataclass(frozen=True)
class TenantLimits:
    """Limits of a tenant per minute, at once, and per day (UTC). None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True)
class Tenant:
    """A tenant. Frozen, hashable, and small enough to travel between processes.

    `salt` is the root of all prefixes that the tenant may find in a cache; "" is the root for a single user.
    `models`: ids, or "*" for all. `priority` is the smallest, that is the most urgent, that it may request.
    """

    name: str
    salt: str = ""
    priority: int = 0
    limits: TenantLimits = field(default_factory=TenantLimits)
    models: tuple[str, ...] = ("*",)

    def allows(self, model: str) -> bool:
        """Whether the tenant may use a model."""
        return "*" in self.models or model in self.models

    def within(self, salt: str | None) -> Tenant:
        """Return the tenant with a part of its cache set apart by the client's salt. Nobody else can name
        that part.
        """
        return replace(self, salt=digest("client", self.salt, salt)) if salt else self


def digest(*parts: str) -> str:
    """Hash several parts into a salt of 64 characters that reveals none of them. Different parts give
    different salts.
    """
    joined = b"".join(
        len(data := part.encode("utf-8", "surrogatepass")).to_bytes(8, "big") + data for part in parts
    )
    return hashlib.sha256(joined).hexdigest()


SHARE_SECONDS = 0.5
"""Seconds by which a sequence's place in the queue moves back for each sequence that its tenant has under
way.
"""


class Shares:
    """Fair places in an engine's queue: a sequence is behind its own tenant's, but not behind all of another
    tenant's.

    If a tenant sends a hundred at once, the first goes ahead of everyone who comes later, and the last is
    half a minute behind. Nobody starves: the delay is bounded by what the own tenant has under way. Within
    one tenant the order is that of arrival.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def late(self, tenant: Tenant) -> float:
        """Count a sequence as under way and return the seconds by which its place is behind its arrival. Call
        `leave` when it has ended.
        """
        now, count = self._clock(), self._under_way.get(tenant.name, 0)
        place = max(now + SHARE_SECONDS * count, self._last.get(tenant.name, now))
        self._under_way[tenant.name], self._last[tenant.name] = count + 1, place
        return place - now

    def leave(self, tenant: Tenant, sequences: int) -> None:
        """Count `sequences` of the tenant's sequences as ended."""
        left = self._under_way.get(tenant.name, 0) - sequences
        if left > 0:
            self._under_way[tenant.name] = left
        else:
            self._under_way.pop(tenant.name, None)
            self._last.pop(tenant.name, None)


ANONYMOUS = Tenant("anonymous", priority=-MAX_PRIORITY)
"""The tenant of all requests to a server without keys."""
