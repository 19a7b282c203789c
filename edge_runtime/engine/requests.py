"""A request in the engine, and the events that it emits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy.typing as npt

from nearfar.edge_runtime.cache import Sequence
from nearfar.edge_runtime.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]

_numbers = itertools.count()


def outside(tokens: Seq[int], vocab: int) -> int | None:
    """The index of the first token id outside a vocabulary of `vocab` tokens; None if there is none.

    A long prompt without such ids takes a tenth of the time of a loop.
    """
    if not len(tokens) or (min(tokens) >= 0 and max(tokens) < vocab):
        return None
    return next(position for position, token in enumerate(tokens) if not 0 <= token < vocab)


@dataclass(frozen=True)
class Logprob:
    """A token and its log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True)
class ScoredRow:
    """A position whose logits are read for the log-probabilities of `tokens` as the next token.

    `optional`: it is read only if its row is computed anyway and the step has a row of logits left for it.
    """

    position: int
    tokens: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class RowScores:
    """What the logits of one position say of the next token, in natural logarithms.

    `logprobs`: of the tokens that were asked for, in their order. `top`: of the likeliest tokens
    (TOP_LOGPROBS of format/sizes.py), in descending order, as samplers report them. `likeliest`: these
    tokens.
    """

    logprobs: tuple[float, ...]
    top: tuple[float, ...]
    likeliest: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One sampled token. The last event of a request has a finish reason; after "stop" its token is the end
    token.
    """

    token: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()
    embedding: npt.NDArray[Any] | None = None
    """float32 [width], from a model that gives embeddings; the token then has no meaning."""
    scores: Mapping[int, RowScores] | None = None
    """The scores of a request with scored rows, by position; the token then has no meaning."""


@dataclass(frozen=True)
class RequestStats:
    """The cost of a request. Times are seconds; prefill starts when the request is admitted."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queued: float
    prefill: float
    decode: float

    @property
    def ttft(self) -> float:
        """Seconds from the call to the first token."""
        return self.queued + self.prefill

    @property
    def prefill_rate(self) -> float:
        """Computed prompt tokens per second."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill if self.prefill else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return (self.completion_tokens - 1) / self.decode if self.decode else 0.0


class Constraint(Protocol):
    """Decides before each token of one request which tokens may come next, for example by a grammar.

    The engine's worker thread calls it, one call at a time: `allowed` for a token, `accept` once the token
    has been read, and so on. A slow call delays steps, but not the event loop. An exception ends this request
    only.
    """

    def allowed(self) -> npt.NDArray[Any]:
        """A mask, uint32 [(vocab_size+31)//32]: bit v%32 of word v/32 says whether token v may be sampled
        next.

        If no bit is set, the request ends.
        """
        ...

    def accept(self, token: int) -> bool:
        """Record a sampled token. False: nothing can continue the text, and the request fails."""
        ...


@dataclass(eq=False)
class Request:
    """The state of one request. The scheduler owns it until it is finished or cancelled.

    `tokens` are the prompt and the known part of the answer. `queued` positions have been given to the
    device; `pending` of them end in a sampled token that has not been read yet. Requests share prefixes if
    they have the same `salt`.

    A request with `scored` rows samples nothing: it ends when all positions of its prompt have been read. A
    `held` one keeps its slot and its pages after that, until it is cancelled or another request needs them,
    so that later requests can start from all of its tokens.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int
    """The most tokens that may be generated."""
    seed: int
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    queued: int = 0
    pending: int = 0
    read: int = 0
    """Positions that the device has computed, as far as the host knows."""
    done: bool = False
    no_room: int = -1
    """The count of released sequences at the moment when the cache had no room for this
    request; -1: it had.
    """
    overtaken: int = 0
    """Requests admitted before this one since it found no room."""
    awaits: tuple[Request, int] | None = None
    """A running request and a number of its first tokens, which are this request's too and are being
    computed.
    """
    number: int = field(default_factory=lambda: next(_numbers))
    cached_tokens: int = 0
    constraint: Constraint | None = None
    salt: str = ""
    scored: tuple[ScoredRow, ...] = ()
    held: bool = False
    scores: dict[int, RowScores] = field(default_factory=dict)
    created: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer, including those not read yet."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Positions to queue before the next token can be sampled."""
        return self.length - self.queued

    @property
    def generated(self) -> int:
        """Tokens sampled so far, including those not read yet."""
        return self.length - len(self.prompt)

    @property
    def exhausted(self) -> bool:
        """Whether the most allowed tokens have been sampled or queued, or all rows to score."""
        return self.remaining <= 0 if self.scored else self.generated >= self.limit

    @property
    def reusable(self) -> int:
        """The most of its first tokens whose keys and values may come from the cache: the first row that is
        needed must be computed.
        """
        needed = (row.position for row in self.scored if not row.optional)
        return next(needed, len(self.tokens) - 1)

    @property
    def idle(self) -> bool:
        """Whether it only holds its pages for others."""
        return self.held and self.read >= len(self.tokens)

    def accept(self, token: int) -> None:
        """Record a sampled token that has been read."""
        self.tokens.append(token)
        self.pending -= 1
        self.last = time.monotonic()
        self.first = self.first or self.last

    def stats(self) -> RequestStats:
        """The figures of the request so far."""
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
