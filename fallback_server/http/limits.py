"""Limits of the server: sizes, times, requests and tokens under way; and the limits of each key."""

from __future__ import annotations

from dataclasses import dataclass, field

from nearfar.fallback_server.engines.base import EngineRequest, Prepared
from nearfar.fallback_server.http.counts import Account, Counts, OwnCounts
from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.tenants import Tenant, TenantLimits

ESTIMATE = "an estimate: the tokenizer is at another server"


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of the whole server, in bytes, counts and seconds. `tokens` counts prompts, and the tokens so
    far of answers that are sent whole.

    `send_buffer`: bytes of a connection's answers that the kernel keeps; the fewer, the sooner a slow reader
    is noticed. `keep_alive`: a stream that was silent this long sends a comment; 0 means never. `fronts`: how
    many servers share the requests of the same keys; each grants its share of limits that are not counted
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
    """A tenant's requests under way and its limits. The object lives as long as the server."""

    tenant: str
    limits: TenantLimits = field(default_factory=TenantLimits)
    concurrent: int = 0

    @property
    def requests(self) -> Account | None:
        """The account of the tenant's requests per minute; None where they are not bounded."""
        most = self.limits.requests_per_minute
        return None if most is None else Account(self.tenant, "requests", most)

    @property
    def tokens(self) -> Account | None:
        """The account of the tenant's tokens per minute; None where they are not bounded."""
        most = self.limits.tokens_per_minute
        return None if most is None else Account(self.tenant, "tokens", most)

    @property
    def day(self) -> Account | None:
        """The account of the tenant's tokens per day; None where they are not bounded."""
        most = self.limits.tokens_per_day
        return None if most is None else Account(self.tenant, "day", most)

    @property
    def charged(self) -> list[Account]:
        """The accounts that a request's tokens are taken from."""
        return [account for account in (self.day, self.tokens) if account is not None]


@dataclass
class AdmittedRequest:
    """A request that was admitted by its tenant's limits. `leave` must be called in any case."""

    admission: Admission
    use: _Use
    admitted: bool = False
    cost: int = 0
    estimate: int | None = None
    """The tokens that were charged for a prompt whose length only an upstream knows."""
    left: bool = field(default=False)

    def admit(self) -> None:
        """Admit the completely received request. Raises ApiError if the server has too many."""
        self.admission.admit(self)

    async def charge(self, prepared: Prepared) -> None:
        """Charge the request's tokens, which are known now. Raises ApiError if they are too many at this
        time.
        """
        await self.admission.charge(self, prepared)

    def hold(self, tokens: int) -> None:
        """Keep `tokens` more tokens for the request until it has ended."""
        self.admission.hold(self, tokens)

    def leave(self, completion_tokens: int = 0, prompt_tokens: int | None = None) -> None:
        """Count the request as ended. `prompt_tokens`: the length of its prompt, which replaces an estimate;
        None where it is not known.
        """
        if not self.left:
            self.left = True
            if self.estimate is not None and prompt_tokens is not None:
                completion_tokens += prompt_tokens - self.estimate
            self.admission.leave(self, completion_tokens)


class Admission:
    """Admits requests, or rejects them with 429 and the time after which to try again.

    Only existing tokens count, never the length that an answer may reach: otherwise clients that give no
    length would be rejected long before the engine is busy. The engine limits how many sequences run and
    wait; output that a slow reader has not taken is bounded where it is stored (token_stream.py). A request
    with no more than an equal share of the server's tokens is admitted, whatever others have.

    A tenant's own limits are checked before its request's body is read, so that bodies cannot pile up beyond
    them. The server's limits are checked when the request is complete, so that slow requests keep no other
    out.
    """

    def __init__(self, limits: ServerLimits, counts: Counts | None = None) -> None:
        self.limits = limits
        self.requests = 0
        self.tokens = 0
        self._counts = counts or OwnCounts(limits.fronts)
        self._uses: dict[str, _Use] = {}

    async def enter(self, tenant: Tenant) -> AdmittedRequest:
        """Admit a request by its tenant's counts. Raises ApiError above a limit."""
        use = self._use(tenant)
        limits = use.limits
        most = None if limits.concurrent is None else -(-limits.concurrent // self.limits.fronts)
        if most is not None and use.concurrent >= most:
            raise _refusal(f"this key has {use.concurrent} requests under way, its limit", "concurrent", 1.0)
        # counted before anything is awaited, because otherwise more than `most` would be admitted
        use.concurrent += 1
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
        return AdmittedRequest(self, use)

    def admit(self, ticket: AdmittedRequest) -> None:
        """Count a request as under way. Raises ApiError if the server has too many."""
        if self.requests >= self.limits.requests:
            raise _refusal(f"the server has {self.requests} requests under way, its limit", "queue_full", 2.0)
        ticket.admitted = True
        self.requests += 1

    async def charge(self, ticket: AdmittedRequest, prepared: Prepared) -> None:
        """Admit a request by its tokens. Raises ApiError above a limit."""
        prompt = prepared.prompt_tokens
        cost = prompt * (answer_weight(prepared.request) if prepared.request.echo else 1)
        claimed: list[Account] = []
        try:
            for account in ticket.use.charged:
                await self._claim(account, prepared)
                claimed.append(account)
            if self.tokens and self._too_many(cost, cost):
                raise _refusal(
                    f"the server has {self.tokens} tokens under way; {'about ' * prepared.estimated}{cost} "
                    "more would be over "
                    f"{self.limits.tokens}",
                    "queue_full",
                    2.0,
                )
        except BaseException:
            for account in claimed:
                self._counts.take(account, -prompt)
            raise
        ticket.cost = cost
        ticket.estimate = prompt if prepared.estimated else None
        self.tokens += cost

    async def _claim(self, account: Account, prepared: Prepared) -> None:
        """Take a prompt's tokens from an account. Raises ApiError where it has too few."""
        prompt, period = prepared.prompt_tokens, "day" if account.what == "day" else "minute"
        code = f"tokens_per_{period}"
        many = f"about {prompt} tokens ({ESTIMATE})" if prepared.estimated else f"{prompt} tokens"
        if prompt > account.most:
            text = f"the prompt has {many}; this key may send {account.most} a {period}"
            raise ApiError(400, text, _text_of(prepared), code)
        wait = await self._counts.claim(account, prompt)
        if wait > 0 and account.what == "day":
            raise ApiError(
                429,
                f"this key may use {account.most} tokens a day, and too few are left for this prompt of "
                f"{many}; the budget starts again at 00:00 UTC, in {_hours(wait)}",
                None,
                code,
                wait,
            )
        if wait > 0:
            raise _refusal(f"this key may use {account.most} tokens a minute", code, wait)

    def hold(self, ticket: AdmittedRequest, tokens: int) -> None:
        """Count tokens that a request has produced. If the total is too large and this request has more than
        an equal share, raise ApiError, even in the middle of an answer.
        """
        ticket.cost += tokens
        self.tokens += tokens
        if self.requests > 1 and self._too_many(0, ticket.cost):
            raise _refusal(
                f"the server has {self.tokens} tokens under way, its limit, and {ticket.cost} of "
                "them are this request's; stream the answer or ask for a shorter one",
                "queue_full",
                2.0,
            )

    def leave(self, ticket: AdmittedRequest, tokens: int) -> None:
        """Count a request as ended. `tokens`: what its tenant pays beyond what was charged; a negative number
        is given back.
        """
        self.requests -= ticket.admitted
        self.tokens -= ticket.cost
        ticket.use.concurrent -= 1
        if tokens:
            for account in ticket.use.charged:
                self._counts.take(account, tokens)

    def _too_many(self, more: int, own: int) -> bool:
        """Whether `more` tokens exceed the bound and `own` is more than an equal share."""
        most = self.limits.tokens
        return self.tokens + more > most and own * max(self.requests, 1) > most

    def under_way(self, name: str) -> int:
        """Requests that a tenant has under way."""
        return self._uses[name].concurrent if name in self._uses else 0

    def _use(self, tenant: Tenant) -> _Use:
        """The tenant's use, with its present limits, which may have been edited."""
        use = self._uses.setdefault(tenant.name, _Use(tenant.name))
        use.limits = tenant.limits
        return use


def answer_weight(request: EngineRequest) -> int:
    """The weight of a token of an answer, in tokens without alternatives.

    An answer that is sent whole stays in memory until its end: about 0.2 KB a token, and 0.15 KB for each
    alternative. Without the weight, 20 alternatives would take 16 times the memory that `tokens` is meant to
    bound.
    """
    return 1 + (request.logprobs or 0) * 3 // 4


def _text_of(prepared: Prepared) -> str:
    """The request field that the prompt's tokens came from."""
    if prepared.request.chat:
        return "messages"
    if prepared.request.questions:
        return "input"
    return "prompt" if prepared.request.pooling is None else "input"


def _refusal(message: str, code: str, wait: float) -> ApiError:
    return ApiError(429, f"{message}; try again in {max(wait, 1):.0f} s", None, code, wait)


def _hours(seconds: float) -> str:
    """A time as hours and minutes, such as "3 h 20 min"."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
