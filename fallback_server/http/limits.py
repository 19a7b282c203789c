"""What the server takes on: sizes, times, requests and tokens under way, and the limits of each key."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nearfar.fallback_server.engines.base import Prepared
from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.keys import Key


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of the whole server. Bytes, counts, seconds; `tokens` counts prompts and the answers they may get."""

    body_bytes: int = 4 << 20
    header_bytes: int = 32 << 10
    json_depth: int = 64
    connections: int = 1024
    requests: int = 256
    tokens: int = 2 << 20
    header_timeout: float = 15.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0


class Bucket:
    """A token bucket that fills in a minute. It may be overdrawn by what was not known beforehand."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.size = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much can be taken; 0: now."""
        self._fill(now)
        return max(0.0, (amount - self._level) * 60 / self.size)

    def take(self, amount: float, now: float) -> None:
        """Take so much, there or not."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self.size, self._level + (now - self._at) * self.size / 60)
        self._at = now


@dataclass
class _KeyUse:
    """What one key has under way and what is left of its minute."""

    key: Key
    concurrent: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass
class Ticket:
    """A request that was let in. `leave` it in any case."""

    admission: Admission
    use: _KeyUse
    cost: int = 0
    left: bool = field(default=False)

    def charge(self, prepared: Prepared) -> None:
        """The request's tokens are known now: refuse it if they are too many at this time."""
        self.admission.charge(self, prepared)

    def leave(self, completion_tokens: int = 0) -> None:
        """The request has ended."""
        if not self.left:
            self.left = True
            self.admission.leave(self, completion_tokens)


class Admission:
    """Lets requests in, or refuses them with 429 and the time after which to try again."""

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.requests = 0
        self.tokens = 0
        self._clock = clock
        self._uses: dict[str, _KeyUse] = {}

    def enter(self, key: Key) -> Ticket:
        """Let a request in by counts."""
        use, now = self._use(key), self._clock()
        if key.concurrent is not None and use.concurrent >= key.concurrent:
            raise _refusal(f"this key has {use.concurrent} requests under way, as many as it may", "concurrent", 1.0)
        if use.requests is not None and (wait := use.requests.wait(1, now)) > 0:
            raise _refusal(f"this key may send {use.requests.size} requests a minute", "requests_per_minute", wait)
        if self.requests >= self.limits.requests:
            raise _refusal(f"the server has {self.requests} requests under way, as many as it takes", "queue_full", 2.0)
        if use.requests is not None:
            use.requests.take(1, now)
        use.concurrent += 1
        self.requests += 1
        return Ticket(self, use)

    def charge(self, ticket: Ticket, prepared: Prepared) -> None:
        """Let a request in by tokens."""
        use, now, cost = ticket.use, self._clock(), prepared.cost
        if use.tokens is not None:
            if prepared.prompt_tokens > use.tokens.size:
                raise ApiError(
                    400, f"the prompt has {prepared.prompt_tokens} tokens; this key may send {use.tokens.size} a minute",
                    "messages", "tokens_per_minute",
                )  # fmt: skip
            if (wait := use.tokens.wait(prepared.prompt_tokens, now)) > 0:
                raise _refusal(f"this key may use {use.tokens.size} tokens a minute", "tokens_per_minute", wait)
        if self.tokens and self.tokens + cost > self.limits.tokens:
            raise _refusal(
                f"the server has {self.tokens} tokens under way; {cost} more would be over {self.limits.tokens}",
                "queue_full", 2.0,
            )  # fmt: skip
        if use.tokens is not None:
            use.tokens.take(prepared.prompt_tokens, now)
        ticket.cost = cost
        self.tokens += cost

    def leave(self, ticket: Ticket, completion_tokens: int) -> None:
        """A request has ended."""
        self.requests -= 1
        self.tokens -= ticket.cost
        ticket.use.concurrent -= 1
        if ticket.use.tokens is not None:
            ticket.use.tokens.take(completion_tokens, self._clock())

    def under_way(self, name: str) -> int:
        """Requests that a key has under way."""
        return self._uses[name].concurrent if name in self._uses else 0

    def _use(self, key: Key) -> _KeyUse:
        use = self._uses.get(key.name)
        if use is None or use.key != key:  # new, or its limits were changed
            now = self._clock()
            requests = Bucket(key.requests_per_minute, now) if key.requests_per_minute else None
            tokens = Bucket(key.tokens_per_minute, now) if key.tokens_per_minute else None
            before = use.concurrent if use else 0
            use = self._uses[key.name] = _KeyUse(key, before, requests, tokens)
        return use


def _refusal(message: str, code: str, wait: float) -> ApiError:
    return ApiError(429, f"{message}; try again in {max(wait, 1):.0f} s", None, code, wait)
