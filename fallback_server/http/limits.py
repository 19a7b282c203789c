"""What the server takes on: sizes, times, requests and tokens under way, and the limits of each key."""

from __future__ import annotations

from dataclasses import dataclass, field

from nearfar.fallback_server.engines.base import EngineRequest, Prepared
from nearfar.fallback_server.http.counts import Account, Counts, OwnCounts
from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.tenants import Limits, Tenant


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of the whole server. Bytes, counts, seconds; `tokens` counts prompts, and what is there of
    answers that are sent as a whole.

    `send_buffer`: what the kernel keeps of a connection's answers; the less, the sooner a reader that is slow
    shows. `keep_alive`: a stream that has nothing to say for so long says a comment; 0: never. `fronts`: how
    many servers share the requests of the same keys, of which each grants its part of what is not counted
    together.
    """

    body_bytes: int = 4 << 20
    header_bytes: int = 32 << 10
    json_depth: int = 64
    connections: int = 1024
    send_buffer: int = 256 << 10
    requests: int = 256
    tokens: int = 2 << 20
    header_timeout: float = 15.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    keep_alive: float = 15.0
    fronts: int = 1


@dataclass
class _Use:
    """What one tenant has under way, and may have. One object as long as the server runs."""

    tenant: str
    limits: Limits = field(default_factory=Limits)
    concurrent: int = 0

    @property
    def requests(self) -> Account | None:
        """The account of the tenant's requests a minute; None where they are not bounded."""
        most = self.limits.requests_per_minute
        return None if most is None else Account(self.tenant, "requests", most)

    @property
    def tokens(self) -> Account | None:
        """The account of the tenant's tokens a minute; None where they are not bounded."""
        most = self.limits.tokens_per_minute
        return None if most is None else Account(self.tenant, "tokens", most)


@dataclass
class Ticket:
    """A request that was let in at the door. `leave` it in any case."""

    admission: Admission
    use: _Use
    admitted: bool = False
    cost: int = 0
    left: bool = field(default=False)

    def admit(self) -> None:
        """The request has come whole: refuse it if the server has too many."""
        self.admission.admit(self)

    async def charge(self, prepared: Prepared) -> None:
        """The request's tokens are known now: refuse it if they are too many at this time."""
        await self.admission.charge(self, prepared)

    def hold(self, tokens: int) -> None:
        """Keep `tokens` more tokens for the request until it has ended."""
        self.admission.hold(self, tokens)

    def leave(self, completion_tokens: int = 0) -> None:
        """The request has ended."""
        if not self.left:
            self.left = True
            self.admission.leave(self, completion_tokens)


class Admission:
    """Lets requests in, or refuses them with 429 and the time after which to try again.

    What counts is what is there, never what an answer may become: clients that do not say how long an answer
    may be would be refused long before the engine has enough to do. How many sequences run and wait is the
    engine's to say; what it has made and a slow reader has not taken is bounded where it lies
    (token_stream.py). Who has no more than an equal part of the server's tokens is let in, whatever others
    have.

    A tenant's own limits are looked at before its request's body is read, so that bodies cannot pile up
    beyond them; the server's when the request is whole, so that none is kept out by others that only dawdle.
    """

    def __init__(self, limits: ServerLimits, counts: Counts | None = None) -> None:
        self.limits = limits
        self.requests = 0
        self.tokens = 0
        self._counts = counts or OwnCounts(limits.fronts)
        self._uses: dict[str, _Use] = {}

    async def enter(self, tenant: Tenant) -> Ticket:
        """Let a request of a tenant in by its counts."""
        use = self._use(tenant)
        limits = use.limits
        most = None if limits.concurrent is None else -(-limits.concurrent // self.limits.fronts)
        if most is not None and use.concurrent >= most:
            raise _refusal(
                f"this key has {use.concurrent} requests under way, as many as it may", "concurrent", 1.0
            )
        use.concurrent += 1  # before anything is waited for, or more than `most` would come past
        try:
            if use.requests is not None and (wait := await self._counts.claim(use.requests, 1)) > 0:
                raise _refusal(
                    f"this key may send {limits.requests_per_minute} requests a minute",
                    "requests_per_minute",
                    wait,
                )
        except BaseException:
            use.concurrent -= 1
            raise
        return Ticket(self, use)

    def admit(self, ticket: Ticket) -> None:
        """Count a request into what the server has under way."""
        if self.requests >= self.limits.requests:
            raise _refusal(
                f"the server has {self.requests} requests under way, as many as it takes", "queue_full", 2.0
            )
        ticket.admitted = True
        self.requests += 1

    async def charge(self, ticket: Ticket, prepared: Prepared) -> None:
        """Let a request in by tokens."""
        account, prompt = ticket.use.tokens, prepared.prompt_tokens
        cost = prompt * (answer_weight(prepared.request) if prepared.request.echo else 1)
        if account is not None:
            most = account.per_minute
            if prompt > most:
                raise ApiError(
                    400,
                    f"the prompt has {prompt} tokens; this key may send {most} a minute",
                    _text_of(prepared),
                    "tokens_per_minute",
                )
            if (wait := await self._counts.claim(account, prompt)) > 0:
                raise _refusal(f"this key may use {most} tokens a minute", "tokens_per_minute", wait)
        if self.tokens and self._too_many(cost, cost):
            if account is not None:
                self._counts.take(account, -prompt)
            raise _refusal(
                f"the server has {self.tokens} tokens under way; {cost} more would be over "
                f"{self.limits.tokens}",
                "queue_full",
                2.0,
            )
        ticket.cost = cost
        self.tokens += cost

    def hold(self, ticket: Ticket, tokens: int) -> None:
        """Count what has come of a request. Where all together is too much, who has more than an equal part
        of what there may be is refused, be it in the middle of an answer.
        """
        ticket.cost += tokens
        self.tokens += tokens
        if self.requests > 1 and self._too_many(0, ticket.cost):
            raise _refusal(
                f"the server has {self.tokens} tokens under way, as many as it takes, and {ticket.cost} of "
                "them are this request's; stream the answer or ask for a shorter one",
                "queue_full",
                2.0,
            )

    def leave(self, ticket: Ticket, completion_tokens: int) -> None:
        """A request has ended."""
        self.requests -= ticket.admitted
        self.tokens -= ticket.cost
        ticket.use.concurrent -= 1
        if completion_tokens and ticket.use.tokens is not None:
            self._counts.take(ticket.use.tokens, completion_tokens)

    def _too_many(self, more: int, own: int) -> bool:
        """Whether so many tokens more are over the bound, of which `own` are more than an equal part."""
        most = self.limits.tokens
        return self.tokens + more > most and own * max(self.requests, 1) > most

    def under_way(self, name: str) -> int:
        """Requests that a tenant has under way."""
        return self._uses[name].concurrent if name in self._uses else 0

    def _use(self, tenant: Tenant) -> _Use:
        """What the tenant has under way, under the limits that it has now: they may have been edited
        meanwhile.
        """
        use = self._uses.setdefault(tenant.name, _Use(tenant.name))
        use.limits = tenant.limits
        return use


def answer_weight(request: EngineRequest) -> int:
    """What a token of an answer counts, in tokens without alternatives.

    An answer that is sent as a whole waits in memory until its end: about 0.2 KB a token, and 0.15 KB for
    each alternative that is told with it. Without this, `tokens` would bound the memory 16 times worse with
    20 of them.
    """
    return 1 + (request.logprobs or 0) * 3 // 4


def _text_of(prepared: Prepared) -> str:
    """The parameter that the prompt's tokens came from."""
    if prepared.request.chat:
        return "messages"
    return "prompt" if prepared.request.pooling is None else "input"


def _refusal(message: str, code: str, wait: float) -> ApiError:
    return ApiError(429, f"{message}; try again in {max(wait, 1):.0f} s", None, code, wait)
