"""Addresses behind one engine: what each serves, which is up, how busy each is, and which to ask next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nearfar.fallback_server.prefixes import PrefixMap, text_blocks
from nearfar.remote.breaker import Breaker, BreakerOptions
from nearfar.remote.errors import RefusedError, RemoteError, briefly
from nearfar.remote.server import CHAT, COMPLETIONS, Listed, Server

log = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(eq=False)
class Address:
    """One server. `models`: as it listed them last. `trouble`: why it lists none now. `heard` is when it was
    last known to work, on the monotonic clock.

    Each path has a circuit of its own: a server without embeddings chats all the same.
    """

    server: Server
    options: BreakerOptions
    clock: Clock
    models: tuple[Listed, ...] = ()
    under_way: int = 0
    trouble: str = ""
    heard: float | None = None
    breakers: dict[str, Breaker] = field(default_factory=dict)

    @property
    def answers(self) -> bool:
        """Whether it may be asked for answers now: a path that nobody used has nothing against it."""
        used = [self.breakers[path] for path in (CHAT, COMPLETIONS) if path in self.breakers]
        return not used or any(breaker.allows(self.clock()) for breaker in used)

    @property
    def why(self) -> str:
        """What is wrong with it, in a few words."""
        if self.trouble:
            return self.trouble
        if not self.models:
            return "it lists no model"
        return "its last requests failed" if not self.answers else "nothing was heard of it lately"

    def breaker(self, path: str) -> Breaker:
        """The circuit of one path."""
        return self.breakers.setdefault(path, Breaker(self.options))

    def works(self) -> None:
        """It was seen to work."""
        self.heard = self.clock()

    async def list(self, seconds: float) -> bool:
        """Ask for its models, which costs it nothing. Whether it told them; if not, those of the last time
        hold.
        """
        try:
            found = await self.server.models(seconds)
        except (RemoteError, RefusedError) as error:
            level = logging.DEBUG if self.trouble else logging.WARNING
            self.heard, self.trouble = None, briefly(error)
            log.log(level, "upstream %s lists no models: %s", self.server.name, self.trouble)
            return False
        self.trouble = ""
        if found != self.models:
            log.info(
                "upstream %s serves %s",
                self.server.name,
                ", ".join(model.id for model in found) or "no model",
            )
        self.models = found
        self.works()
        return bool(found)

    @contextmanager
    def calling(self, path: str) -> Iterator[None]:
        """Count a call to a path as under way, and report its outcome to the path's circuit breaker."""
        breaker = self.breaker(path)
        given = breaker.begin(self.clock()) or "request"
        self.under_way += 1
        try:
            yield
        except RemoteError as error:
            if error.broken:
                breaker.failure(self.clock(), given)
                self.heard = None
            elif error.busy:
                breaker.success(given)
            else:
                breaker.abandoned(given)
            raise
        except RefusedError:
            breaker.success(given)
            raise
        except BaseException:
            breaker.abandoned(given)
            raise
        else:
            breaker.success(given)
            self.works()
        finally:
            self.under_way -= 1


class AddressBook:
    """Chooses of the addresses that serve a model the one with the fewest requests under way.

    One that knows the prompt's beginning is preferred as long as it has no more than `slack` requests more.
    """

    def __init__(
        self, servers: Collection[Server], options: BreakerOptions, slack: int, clock: Clock = time.monotonic
    ) -> None:
        self.addresses = [Address(server, options, clock) for server in servers]
        self._slack, self._clock = slack, clock
        self.prefixes: PrefixMap[Address] = PrefixMap()

    def models(self) -> tuple[Listed, ...]:
        """All that are served, in the order of the addresses; of a context that differs, the shortest."""
        found: dict[str, Listed] = {}
        for model in (model for address in self.addresses for model in address.models):
            known = found.setdefault(model.id, model)
            if model.context is not None and (known.context is None or model.context < known.context):
                found[model.id] = model
        return tuple(found.values())

    def candidates(self, prompt: str, path: str, model: str, attempts: int) -> Iterator[Address]:
        """The addresses to ask, one after the other. Each is chosen when it is asked for."""
        tried: list[Address] = []
        while len(tried) < attempts and (address := self.choose(prompt, path, model, tried)) is not None:
            tried.append(address)
            yield address

    def choose(self, prompt: str, path: str, model: str, without: Collection[Address] = ()) -> Address | None:
        """The address for a prompt; None if all that serve the model are down or excluded."""
        now = self._clock()
        able = [
            address for address in self.addresses
            if address not in without and any(listed.id == model for listed in address.models)
            and address.breaker(path).allows(now)
        ]  # fmt: skip
        if not able:
            return None
        chosen = min(able, key=lambda address: address.under_way)
        blocks, most = text_blocks(f"{model}\n{prompt}"), chosen.under_way + self._slack
        known = next(iter(self.prefixes.known(blocks)), None)
        if known is not None and known in able and known.under_way <= most:
            chosen = known
        self.prefixes.remember(blocks, chosen)
        return chosen
