"""Limits of a key per minute, as two token buckets: one for its requests, one for its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Account:
    """A tenant's limit per minute, of requests or of tokens."""

    tenant: str
    what: Literal["requests", "tokens"]
    per_minute: int


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


class OwnCounts:
    """Counts of this process alone. As one of `fronts` servers it grants its share of each limit: load
    balancers spread requests evenly enough.
    """

    def __init__(self, fronts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._fronts, self._clock = fronts, clock
        self._buckets: dict[tuple[str, str], tuple[int, Bucket]] = {}

    async def claim(self, account: Account, amount: float) -> float:
        """See Counts."""
        now = self._clock()
        bucket = self._bucket(account, now)
        wait = bucket.wait(amount, now)
        if wait <= 0:
            bucket.take(amount, now)
        return wait

    def take(self, account: Account, amount: float) -> None:
        """See Counts."""
        now = self._clock()
        self._bucket(account, now).take(amount, now)

    def _bucket(self, account: Account, now: float) -> Bucket:
        name, part = (account.tenant, account.what), account.per_minute / self._fronts
        per_minute, bucket = self._buckets.get(name) or (account.per_minute, Bucket(part, now))
        if per_minute != account.per_minute:
            bucket.resize(part, now)
        self._buckets[name] = account.per_minute, bucket
        return bucket
