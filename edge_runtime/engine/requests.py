"""A request on its way through the engine, and the events it gives back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy.typing as npt

from nearfar.edge_runtime.cache import Sequence
from nearfar.edge_runtime.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]

_numbers = itertools.count()


def outside(tokens: Seq[int], vocab: int) -> int | None:
    """Where the first token id outside a vocabulary stands; None: there is none. For a long prompt that is
    good this takes a tenth of the time of a loop.
    """
    if not len(tokens) or (min(tokens) >= 0 and max(tokens) < vocab):
        return None
    return next(position for position, token in enumerate(tokens) if not 0 <= token < vocab)


@dataclass(frozen=True)
class TopLogprob:
    """An alternative to a sampled token."""

    token: int
    logprob: float


@dataclass(frozen=True)
class TokenEvent:
    """One sampled token. The last event of a request has a finish reason; after "stop" its token is the
    end token.
    """

    token: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()
    embedding: npt.NDArray[Any] | None = None
    """float32 [width], of a model that gives embeddings; the token means nothing then."""


@dataclass(frozen=True)
class RequestStats:
    """What a request cost. Times are seconds; prefill starts when the request is admitted."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queued: float
    prefill: float
    decode: float

    @property
    def ttft(self) -> float:
        """Time from the call to the first token."""
        return self.queued + self.prefill

    @property
    def prefill_rate(self) -> float:
        """Computed prompt tokens a second."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill if self.prefill else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return (self.completion_tokens - 1) / self.decode if self.decode else 0.0


class Constraint(Protocol):
    """Says before each token of one request which tokens may come (a grammar, for example).

    Called from the engine's worker thread, one call at a time: `allowed` for a token, `accept` once it has
    been read, and so on. What takes long holds up steps, but not the event loop. Whatever is raised ends the
    request, and no other.
    """

    def allowed(self) -> npt.NDArray[Any]:
        """uint32 [(vocab_size+31)//32]: bit v%32 of word v/32 says whether token v may be sampled next. No
        bit: the request ends.
        """
        ...

    def accept(self, token: int) -> bool:
        """Take note of a sampled token. False: nothing can continue the text, and the request fails."""
        ...


@dataclass(eq=False)
class Request:
    """The state of one request. The scheduler owns it until it is finished or cancelled.

    `tokens` are the prompt and the answer as far as it is known; `queued` positions have been given to the
    device, `pending` of them end in a sampled token that has not been read yet. Requests share prefixes if
    their `salt` is the same.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int
    """Tokens that may be generated."""
    seed: int
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    queued: int = 0
    pending: int = 0
    read: int = 0
    """Positions that have been computed, and that the host knows of."""
    done: bool = False
    no_room: int = -1
    """What the cache had been given back when no room was found for this request."""
    overtaken: int = 0
    """Requests that were admitted before this one since it found no room."""
    awaits: tuple[Request, int] | None = None
    """A running request whose first tokens, so many, are this one's too and are being computed."""
    number: int = field(default_factory=lambda: next(_numbers))
    cached_tokens: int = 0
    constraint: Constraint | None = None
    salt: str = ""
    created: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer, those still unread included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Positions to queue before the next token can be sampled."""
        return self.length - self.queued

    @property
    def generated(self) -> int:
        """Tokens sampled so far, those still unread included."""
        return self.length - len(self.prompt)

    @property
    def exhausted(self) -> bool:
        """Whether as many tokens are on their way as may be generated."""
        return self.generated >= self.limit

    def accept(self, token: int) -> None:
        """A sampled token has been read."""
        self.tokens.append(token)
        self.pending -= 1
        self.last = time.monotonic()
        self.first = self.first or self.last

    def stats(self) -> RequestStats:
        """The figures so far."""
        admitted = self.admitted or time.monotonic()
        first = self.first or time.monotonic()
        return RequestStats(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.tokens) - len(self.prompt),
            queued=admitted - self.created,
            prefill=max(first - admitted, 0.0),
            decode=max(self.last - first, 0.0),
        )
