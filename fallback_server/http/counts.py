"""Limits of a key: per minute two token buckets, one for its requests and one for its tokens; per day (UTC) a
budget of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Account:
    """A tenant's limit: of requests or tokens per minute, or of tokens per day ("day")."""

    tenant: str
    what: Literal["requests", "tokens", "day"]
    most: int


class Counts(Protocol):
    """The counts of accounts. An account whose limit was edited keeps its earlier use."""

    async def claim(self, account: Account, amount: float) -> float:
        """Take `amount` if it is available and return 0; else take nothing and return the seconds until it
        is.
        """
        ...

    def take(self, account: Account, amount: float) -> None:
        """Take `amount`, available or not. A negative amount is given back."""
        ...


class Bucket:
    """A token bucket that fills in a minute. Amounts that were not known beforehand, or exceed its size, may
    overdraw it.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute
        self._level = self._size
        self._at = now

    @property
    def _size(self) -> float:
        return max(self._rate, 1.0)  # half a request a minute is one request in two minutes

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken; 0 means now. An amount above the bucket's size waits until it
        is full.
        """
        self._fill(now)
        return max(0.0, (min(amount, self._size) - self._level) * 60 / self._rate)

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, available or not."""
        self._fill(now)
        self._level -= amount

    def resize(self, per_minute: float, now: float) -> None:
        """Change the size. The amount that was taken stays taken."""
        self._fill(now)
        self._level += per_minute - self._rate
        self._rate = per_minute

    def _fill(self, now: float) -> None:
        self._level = min(self._size, self._level + (now - self._at) * self._rate / 60)
        self._at = now


DAY = 86400


class Budget:
    """An amount for each day, UTC. It may be overdrawn, by answers whose length was not known beforehand; the
    next day begins with the whole amount nevertheless. Times are seconds since 1970.
    """

    def __init__(self, most: float, now: float) -> None:
        self._most, self._used, self._day = most, 0.0, now // DAY

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken: 0, or the seconds until midnight."""
        self._turn(now)
        return 0.0 if self._used + amount <= self._most else (self._day + 1) * DAY - now

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, available or not."""
        self._turn(now)
        self._used = max(0.0, self._used + amount)

    def resize(self, most: float, now: float) -> None:
        """Change the amount for a day. What was used today stays used."""
        self._most = most

    def _turn(self, now: float) -> None:
        if now // DAY != self._day:
            self._day, self._used = now // DAY, 0.0


class OwnCounts:
    """Counts of this process alone. As one of `fronts` servers it grants its share of each limit: load
    balancers spread requests evenly enough.
    """

    def __init__(
        self,
        fronts: int,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        self._fronts, self._clock, self._calendar = fronts, clock, calendar
        self._buckets: dict[tuple[str, str], tuple[int, Bucket | Budget]] = {}

    async def claim(self, account: Account, amount: float) -> float:
        """See Counts."""
        now = self._now(account)
        bucket = self._bucket(account, now)
        wait = bucket.wait(amount, now)
        if wait <= 0:
            bucket.take(amount, now)
        return wait

    def take(self, account: Account, amount: float) -> None:
        """See Counts."""
        now = self._now(account)
        self._bucket(account, now).take(amount, now)

    def _now(self, account: Account) -> float:
        return self._calendar() if account.what == "day" else self._clock()

    def _bucket(self, account: Account, now: float) -> Bucket | Budget:
        name, part = (account.tenant, account.what), account.most / self._fronts
        kind = Budget if account.what == "day" else Bucket
        most, bucket = self._buckets.get(name) or (account.most, kind(part, now))
        if most != account.most:
            bucket.resize(part, now)
        self._buckets[name] = account.most, bucket
        return bucket
