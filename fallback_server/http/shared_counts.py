"""Limits of a key, counted by several servers together in a Redis that all of them reach."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import Literal, Protocol
from urllib.parse import urlsplit

from nearfar.errors import RequestError
from nearfar.fallback_server.http.counts import Account, OwnCounts
from nearfar.fallback_server.tenants import digest
from nearfar.remote.breaker import Breaker, BreakerOptions

log = logging.getLogger(__name__)

PREFIX = "nearfar:limits:"
PATIENCE = 2.0
"""Most seconds that a request waits for the store."""
PROBE_SECONDS = 5.0
"""Seconds to wait before a failed store is tried again."""
CONNECTIONS = 16

# The algorithms of counts.Bucket and counts.Budget with the store's clock, as one atomic script. A full
# bucket equals a missing one, so its key expires when it would be full; a budget's key expires at midnight.
SCRIPT = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local rate, amount, must = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == 'claim'
local function exact(number) return string.format('%.17g', number) end
if ARGV[4] == 'day' then
  local left = 86400 - now % 86400
  local used = tonumber(redis.call('GET', KEYS[1]) or '0')
  if used + amount > rate and must then return exact(left) end
  used = math.max(0, used + amount)
  redis.call('SET', KEYS[1], exact(used), 'PX', string.format('%.0f', math.ceil(left * 1000)))
  return '0'
end
local size = math.max(rate, 1)
local level = size
local kept = redis.call('HMGET', KEYS[1], 'level', 'at', 'rate')
if kept[1] then
  local before = tonumber(kept[3])
  level = tonumber(kept[1]) + math.max(0, now - tonumber(kept[2])) * before / 60
  level = math.min(size, math.min(math.max(before, 1), level) + rate - before)
end
local wait = math.max(0, (math.min(amount, size) - level) * 60 / rate)
if wait == 0 or not must then level = level - amount end
redis.call('HSET', KEYS[1], 'level', exact(level), 'at', exact(now), 'rate', exact(rate))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.max(1, math.ceil((size - level) * 60000 / rate))))
return exact(wait)
"""


class RedisScript(Protocol):
    """SCRIPT as registered with the Redis client."""

    def __call__(self, keys: list[str], args: list[object]) -> Awaitable[bytes | str]:
        """Run the script."""
        ...


class SharedCounts:
    """Counts of all servers together. While the store fails, this server counts for itself and rejects no
    request for that.

    It logs the failure once, and once when the store is back. What was counted meanwhile is not transferred,
    so a key may get up to a minute's amount more at each change.
    """

    def __init__(
        self, script: RedisScript, own: OwnCounts, place: str, clock: Callable[[], float] = time.monotonic,
        disconnect: Callable[[], Awaitable[None]] | None = None,
    ) -> None:  # fmt: skip
        self._script, self._own, self._place, self._clock, self._disconnect = (
            script,
            own,
            place,
            clock,
            disconnect,
        )
        self._breaker = Breaker(BreakerOptions(failures=1, seconds=PROBE_SECONDS, max_seconds=PROBE_SECONDS))
        self._taking: set[asyncio.Task[None]] = set()

    async def claim(self, account: Account, amount: float) -> float:
        """See Counts."""
        wait = await self._ask(account, amount, "claim")
        return await self._own.claim(account, amount) if wait is None else wait

    def take(self, account: Account, amount: float) -> None:
        """Take `amount` (see Counts). A separate task tells the store, because the caller may be a cancelled
        request.
        """
        task = asyncio.get_running_loop().create_task(self._take(account, amount))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def settled(self) -> None:
        """Wait until all that was taken is counted."""
        while self._taking:
            await asyncio.wait(self._taking)

    async def close(self) -> None:
        """Wait for the last counts, then disconnect."""
        await self.settled()
        if self._disconnect is not None:
            with suppress(Exception):
                await self._disconnect()

    async def _take(self, account: Account, amount: float) -> None:
        if await self._ask(account, amount, "take") is None:
            self._own.take(account, amount)

    async def _ask(self, account: Account, amount: float, verb: Literal["claim", "take"]) -> float | None:
        """Run the script and return the seconds to wait; None where the store fails."""
        given = self._breaker.begin(self._clock())
        if given is None:
            return None
        try:
            async with asyncio.timeout(PATIENCE):
                args: list[object] = [account.most, amount, verb]
                args += ["day"] if account.what == "day" else []
                wait = float(await self._script(keys=[_key(account)], args=args))
        except Exception as error:  # any error at all: no request fails because it could not be counted
            self._failed(error, given)
            return None
        except BaseException:
            self._breaker.abandoned(given)
            raise
        if given == "probe":
            log.warning("the limits store at %s answers again: the servers count together", self._place)
        self._breaker.success(given)
        return wait

    def _failed(self, error: Exception, given: Literal["request", "probe"]) -> None:
        now = self._clock()
        if self._breaker.state(now) == "closed":
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            log.error(
                "the limits store at %s fails (%s): each server counts for itself until it answers",
                self._place,
                reason,
            )
        self._breaker.failure(now, given)


async def open_store(url: str, own: OwnCounts) -> SharedCounts:
    """Connect to the counts in a Redis. Raises RequestError if it cannot be used now."""
    place = _place(url)
    # The library is optional, also for type checkers, so it is imported by name.
    try:
        redis = import_module("redis.asyncio")
        backoff, retry = import_module("redis.backoff"), import_module("redis.asyncio.retry")
    except ModuleNotFoundError as error:
        raise RequestError(
            f"--limits-store needs {error.name}: pip install 'nearfar[limits]'", "limits_store"
        ) from error
    # Idle connections to the store may be cut: they are opened again, once. A slow store is not called twice,
    # because it may have counted the first time.
    again = retry.Retry(backoff.NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=PATIENCE,
            socket_timeout=PATIENCE,
            socket_connect_timeout=PATIENCE,
            retry=again,
        )
        client = redis.Redis.from_pool(pool)
        script = client.register_script(SCRIPT)
        async with asyncio.timeout(2 * PATIENCE):
            await script(keys=[PREFIX + "probe"], args=[1, 0, "take"])
    except Exception as error:
        raise RequestError(
            f"the limits store at {place} cannot be used ({error or type(error).__name__}): start it, or "
            "serve without --limits-store",
            "limits_store",
        ) from error
    return SharedCounts(script, own, place, disconnect=client.aclose)


def _key(account: Account) -> str:
    """The store's key for an account. It does not reveal the tenant to a reader of the store."""
    return f"{PREFIX}{digest('limits', account.tenant)}:{account.what}"


def _place(url: str) -> str:
    """Host and port of a store's address, which may contain a password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 6379
    except ValueError:
        parts, host, port = urlsplit(""), None, 0
    if parts.scheme not in ("redis", "rediss") or not host or not re.fullmatch(r"/?|/\d+", parts.path):
        raise RequestError("--limits-store must be redis://HOST:PORT/0 (or rediss://)", "limits_store")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
