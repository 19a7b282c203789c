"""What is left of a key's minute: a token bucket for its requests and one for its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Account:
    """What a tenant may have of something in a minute."""

    tenant: str
    what: Literal["requests", "tokens"]
    per_minute: int


class Counts(Protocol):
    """Keeps accounts. One whose bound was edited keeps count of what was taken before."""

    async def claim(self, account: Account, amount: float) -> float:
        """Take so much if it is there, and give 0; else take nothing, and give the seconds until it will
        be there.
        """
        ...

    def take(self, account: Account, amount: float) -> None:
        """Take so much, there or not. Less than nothing is given back."""
        ...


class Bucket:
    """A token bucket that fills in a minute. It may be overdrawn: by what was not known beforehand, and by
    what is larger.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute
        self._level = self._size
        self._at = now

    @property
    def _size(self) -> float:
        return max(self._rate, 1.0)  # half a request a minute is one in two minutes

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much can be taken; 0: now. What is larger than the bucket waits until it is
        full.
        """
        self._fill(now)
        return max(0.0, (min(amount, self._size) - self._level) * 60 / self._rate)

    def take(self, amount: float, now: float) -> None:
        """Take so much, there or not."""
        self._fill(now)
        self._level -= amount

    def resize(self, per_minute: float, now: float) -> None:
        """Another size from now on. What was taken stays taken."""
        self._fill(now)
        self._level += per_minute - self._rate
        self._rate = per_minute

    def _fill(self, now: float) -> None:
        self._level = min(self._size, self._level + (now - self._at) * self._rate / 60)
        self._at = now


class OwnCounts:
    """Counts of this process alone. It is one of `fronts`, and grants its part: balancers spread requests
    evenly enough.
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
