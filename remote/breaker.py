"""A circuit breaker for a server. Callers pass the time (seconds on any monotonic clock); nothing is
random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "half_open", "open"]
Pass = Literal["request", "probe"]
"""The kind of a call: `begin` returns it, and the end of the call gives it back. Only a probe can close an
open circuit, or keep it open.
"""


@dataclass(frozen=True)
class BreakerOptions:
    """`failures` in a row open the circuit for `seconds`; each failed probe doubles that time, up to
    `max_seconds`.
    """

    failures: int = 3
    seconds: float = 5.0
    max_seconds: float = 300.0


class Breaker:
    """Opens after failures in a row. When its time is over, it admits one probe at a time, and closes if a
    probe succeeds.

    In addition, the server may request a pause (`hold`: a 429 with Retry-After): then it counts as working,
    but no call is admitted.
    """

    def __init__(self, options: BreakerOptions | None = None) -> None:
        self._options = options or BreakerOptions()
        self._failures = 0
        self._opened: float | None = None
        self._period = self._options.seconds
        self._held_until = 0.0
        self._probing = False

    def state(self, now: float) -> BreakerState:
        """Return "closed", "half_open" (a probe may start, or is under way), or "open"."""
        if self._opened is None:
            return "closed"
        return "half_open" if now - self._opened >= self._period else "open"

    def allows(self, now: float) -> bool:
        """Whether a call may start now."""
        if now < self._held_until:
            return False
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._probing)

    def retry_after(self, now: float) -> float:
        """Seconds until a call may start, as far as time alone decides; 0 means now."""
        opens = 0.0 if self._opened is None else self._opened + self._period
        return max(opens - now, self._held_until - now, 0.0)

    def begin(self, now: float) -> Pass | None:
        """Start a call; its end gives the returned kind back. None where the call may not start."""
        if not self.allows(now):
            return None
        if self.state(now) == "closed":
            return "request"
        self._probing = True
        return "probe"

    def success(self, given: Pass) -> None:
        """Record an answered call. A late answer from before the circuit opened changes nothing."""
        if given == "probe" or self._opened is None:
            self._failures, self._opened, self._probing = 0, None, False
            self._period = self._options.seconds

    def failure(self, now: float, given: Pass) -> None:
        """Record a failed call."""
        if given == "probe":
            self._probing = False
            self._opened = now
            self._period = min(self._period * 2, self._options.max_seconds)
        elif self._opened is None:
            self._failures += 1
            if self._failures >= self._options.failures:
                self._opened = now

    def abandoned(self, given: Pass) -> None:
        """Record a call that ended without evidence about the server: the caller left, or the request was
        rejected.
        """
        if given == "probe":
            self._probing = False

    def hold(self, now: float, seconds: float) -> None:
        """Admit no calls for `seconds`, as the server requested."""
        self._held_until = max(self._held_until, now + seconds)
