"""Retries to the cloud without a storm: a bound for each wait, and a budget that all requests share. Nothing
is random here.
"""

from __future__ import annotations

from nearfar.routing.policy import RetryOptions


def backoff(attempt: int, random: float, retry_after: float | None, options: RetryOptions) -> float | None:
    """Seconds to wait before the retry `attempt` (0 is the first); None: do not retry.

    "Full jitter": `random` is uniform in [0, 1). The wait of Retry-After (seconds) is kept in full, and the
    jitter is added to it.
    """
    if attempt >= options.attempts:
        return None
    wait = (retry_after or 0.0) + random * min(options.cap, options.base * 2.0**attempt)
    return wait if wait <= options.max_wait else None


class RetryBudget:
    """A bucket of retries: each request adds a fraction of one, each retry takes a whole one."""

    def __init__(self, options: RetryOptions | None = None) -> None:
        self._options = options or RetryOptions()
        self.left = self._options.burst

    def request(self) -> None:
        """Record a request (not a retry)."""
        self.left = min(self.left + self._options.ratio, self._options.burst)

    def withdraw(self) -> bool:
        """Take one retry from the budget. Returns False where there is none."""
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True
