"""Addresses of one upstream model: which is up, how busy each is, and which to ask next."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

BLOCK = 256
"""Characters of a prompt that are hashed together. Shorter prompts have no affinity."""
REMEMBERED = 65536
"""Blocks whose address is remembered."""


class Breaker:
    """A circuit breaker: opens after `failures` in a row, lets one request try after `seconds`, closes if that is well."""

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float]) -> None:
        self._limit, self._seconds, self._clock = failures, seconds, clock
        self._failures = 0
        self._opened: float | None = None
        self._trying = False

    @property
    def state(self) -> str:
        """closed, open, or half-open."""
        if self._opened is None:
            return "closed"
        return "half-open" if self._clock() - self._opened >= self._seconds else "open"

    def allows(self) -> bool:
        """Whether a request may go."""
        return self.state == "closed" or (self.state == "half-open" and not self._trying)

    def begin(self) -> None:
        """A request goes."""
        self._trying = self.state == "half-open"

    def success(self) -> None:
        """A request was answered."""
        self._failures, self._opened, self._trying = 0, None, False

    def failure(self) -> None:
        """A request failed."""
        self._failures += 1
        if self._failures >= self._limit or self._opened is not None:
            self._opened = self._clock()
        self._trying = False

    def abandoned(self) -> None:
        """A request ended without telling anything of the address."""
        self._trying = False


@dataclass(eq=False)
class Address:
    """One server. `last_token` is when it last gave a token, on the monotonic clock."""

    url: str
    breaker: Breaker
    under_way: int = 0
    last_token: float = 0.0


class AddressBook:
    """Chooses the address with the fewest requests under way, or the one that knows the prompt's beginning.

    The latter as long as it has no more than `slack` requests more.
    """

    def __init__(
        self, urls: Collection[str], *, failures: int, seconds: float, slack: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.addresses = [Address(url.rstrip("/"), Breaker(failures, seconds, clock)) for url in urls]
        self._slack = slack
        self._blocks: OrderedDict[bytes, Address] = OrderedDict()

    def choose(self, prompt: str, without: Collection[Address] = ()) -> Address | None:
        """The address for a prompt; None if all are down or excluded."""
        able = [a for a in self.addresses if a not in without and a.breaker.allows()]
        if not able:
            return None
        chosen = min(able, key=lambda address: address.under_way)
        blocks = _blocks(prompt)
        known = next((self._blocks[block] for block in reversed(blocks) if block in self._blocks), None)
        if known in able and known is not None and known.under_way <= chosen.under_way + self._slack:
            chosen = known
        for block in blocks:
            self._blocks[block] = chosen
            self._blocks.move_to_end(block)
        while len(self._blocks) > REMEMBERED:
            self._blocks.popitem(last=False)
        return chosen


def _blocks(prompt: str) -> list[bytes]:
    """A hash for each whole block, of everything up to its end."""
    running, out = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        running.update(prompt[start : start + BLOCK].encode(errors="replace"))
        out.append(running.digest())
    return out
