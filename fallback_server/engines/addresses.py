"""The upstream addresses of one engine: the models that each serves, its health and load, and which to use
next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nearfar.fallback_server.prefixes import PrefixMap, text_blocks
from nearfar.remote.breaker import Breaker, BreakerOptions
from nearfar.remote.errors import RefusedError, RemoteError, briefly
from nearfar.remote.server import CHAT, COMPLETIONS, NATIVE, ListedModel, Paths, Server

log = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(eq=False)
class Address:
    """One upstream server. `models`: the models that it listed last. `trouble`: why listing fails now, or "".
    `heard`: when it was last known to work, on the monotonic clock. `paths`: which paths of NATIVE it lists;
    `unread`: reading these has failed, and is tried again with the next list of models.

    Each path has its own circuit breaker: a server without embeddings can still answer chats.
    """

    server: Server
    options: BreakerOptions
    clock: Clock
    models: tuple[ListedModel, ...] = ()
    under_way: int = 0
    trouble: str = ""
    heard: float | None = None
    paths: Paths = field(default_factory=dict)
    unread: bool = False
    breakers: dict[str, Breaker] = field(default_factory=dict)
    _listing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def answers(self) -> bool:
        """Whether the address may get requests for answers now. A path without calls so far counts as
        working.
        """
        used = [self.breakers[path] for path in (CHAT, COMPLETIONS) if path in self.breakers]
        return not used or any(breaker.allows(self.clock()) for breaker in used)

    @property
    def why(self) -> str:
        """Why the address is not usable, in a few words."""
        if self.trouble:
            return self.trouble
        if not self.models:
            return "it lists no model"
        return "its last requests failed" if not self.answers else "it has not answered lately"

    def breaker(self, path: str) -> Breaker:
        """Return the circuit breaker of a path."""
        return self.breakers.setdefault(path, Breaker(self.options))

    def works(self) -> None:
        """Record that the address works now."""
        self.heard = self.clock()

    async def list(self, seconds: float) -> bool:
        """Request the address's list of models, which costs it nothing. Returns whether it lists any; if the
        request fails, the earlier list stays. Callers that come meanwhile wait, and compare with what the
        first one learnt: otherwise each would read the description of a server that it sees as new.
        """
        async with self._listing:
            return await self._list(seconds)

    async def _list(self, seconds: float) -> bool:
        try:
            found = await self.server.models(seconds)
        except (RemoteError, RefusedError) as error:
            level = logging.DEBUG if self.trouble else logging.WARNING
            self.heard, self.trouble = None, briefly(error)
            log.log(level, "upstream %s lists no models: %s", self.server.name, self.trouble)
            return False
        if self.trouble or self.unread or found != self.models:
            await self._read_paths(seconds)
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

    async def _read_paths(self, seconds: float) -> None:
        try:
            self.paths, self.unread = await self.server.paths(seconds), False
            return
        except RefusedError as error:
            said, again = briefly(error), False
        except RemoteError as error:  # llama.cpp and Ollama have no description
            said, again = briefly(error), error.code != "shape" and (error.broken or error.busy)
        level = logging.WARNING if again and not self.unread else logging.DEBUG
        log.log(level, "upstream %s describes no paths: %s", self.server.name, said)
        self.paths, self.unread = {}, again

    def serves(self, path: str, model: str) -> bool:
        """Whether the address has the model, and the path if that is one of NATIVE."""
        return (path not in NATIVE or path in self.paths) and any(each.id == model for each in self.models)

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
    """Chooses, among the addresses that serve a model, the one with the fewest requests under way.

    An address that knows the prompt's beginning is preferred as long as it has at most `slack` requests more.
    """

    def __init__(
        self, servers: Collection[Server], options: BreakerOptions, slack: int, clock: Clock = time.monotonic
    ) -> None:
        self.addresses = [Address(server, options, clock) for server in servers]
        self._slack, self._clock = slack, clock
        self.prefixes: PrefixMap[Address] = PrefixMap()

    def models(self) -> tuple[ListedModel, ...]:
        """All models that the addresses serve, in the order of the addresses. Where their context lengths
        differ, the shortest counts.
        """
        found: dict[str, ListedModel] = {}
        for model in (model for address in self.addresses for model in address.models):
            known = found.setdefault(model.id, model)
            if model.context is not None and (known.context is None or model.context < known.context):
                found[model.id] = model
        return tuple(found.values())

    def able(self, path: str, model: str) -> bool:
        """Whether an address that lists its models may get a request for a model now."""
        now = self._clock()
        return any(
            not each.trouble and each.serves(path, model) and each.breaker(path).allows(now)
            for each in self.addresses
        )

    def candidates(self, prompt: str, path: str, model: str, attempts: int) -> Iterator[Address]:
        """Yield the addresses to try, one after the other. Each is chosen when the caller takes it."""
        tried: list[Address] = []
        while len(tried) < attempts and (address := self.choose(prompt, path, model, tried)) is not None:
            tried.append(address)
            yield address

    def choose(self, prompt: str, path: str, model: str, without: Collection[Address] = ()) -> Address | None:
        """Choose the address for a prompt; None if all that serve the model are down or excluded."""
        now = self._clock()
        able = [
            address for address in self.addresses
            if address not in without and address.serves(path, model) and address.breaker(path).allows(now)
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
