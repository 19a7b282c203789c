"""The token-level interface between the server and an engine: token ids in, token events out. Each kind of
engine implements it once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nearfar.edge_runtime.engine.requests import Logprob
from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.format.sampling import NOTHING, SamplingDefaults

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request: fields of SamplingParams, without its checks. `temperature` 0 is
    greedy. `logit_bias` maps token ids to what is added to their logits. `seed` has 64 bits; with None the
    engine draws one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 turns it off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


GRAMMAR_SECONDS = 5.0
"""Seconds of processor time that compiling one grammar may take, without the start of its process."""


@dataclass(frozen=True)
class TokenRequest:
    """One sequence to complete. `id` is unique. Requests of smaller `priority` run first, as in vLLM.

    `prompt_logprobs`: also return log-probabilities of the prompt's own tokens, with that many alternatives
    each. `salt`: only requests with the same salt share prefixes in a cache. `late`: seconds that are added
    to the request's arrival time in the queue.
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] = frozenset()  # end tokens; the event of such a token has finish "stop"
    # the end tokens that come only if the grammar allows no other token
    held_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None  # how many alternatives to give; with 0 only the token's own
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0  # the first token of the prompt whose log-probability is wanted
    grammar: Grammar | None = None
    priority: int = 0
    salt: str = ""
    late: float = 0.0


@dataclass(frozen=True)
class ScoreRequest:
    """Labels whose log-probabilities after a prompt are wanted. The other fields mean the same as in a
    TokenRequest.
    """

    id: str
    tokens: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    priority: int = 0
    salt: str = ""
    late: float = 0.0


LabelScores = list[tuple[float, ...]]
"""For each label, the log-probability of each of its tokens."""

Pooling = Literal["mean", "last", "model"]


@dataclass(frozen=True)
class EmbedRequest:
    """One sequence to embed. Each field means the same as in a TokenRequest: embeddings wait in the same
    queue, and a cache keeps the prefixes of tenants apart for them too.
    """

    id: str
    tokens: tuple[int, ...]
    pooling: Pooling = "model"
    priority: int = 0
    salt: str = ""
    late: float = 0.0


PromptLogprob = tuple[Logprob, tuple[Logprob, ...]] | None
"""The log-probability of a token of a prompt, and the likeliest tokens there; None for the first token."""


@dataclass(frozen=True)
class BackendEvent:
    """One sampled token, as a backend reports it: an engine of a device has TokenEvent. The last event of a
    request has `finish`.

    The first event carries `prompt_logprobs`: one entry per prompt token from `prompt_logprobs_from` on; that
    of the very first token is None.
    """

    token: int | None
    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache, told with the first event
    queued: float | None = None  # seconds from the submission to the first step, told with the first event


@dataclass(frozen=True)
class BackendInfo:
    """What a model is and how much its engine carries."""

    model: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    max_running: int
    cache_tokens: int  # the number of tokens that the KV cache holds
    sampling: SamplingDefaults = NOTHING  # the parameters of a request that gives none


@dataclass(frozen=True)
class RunningProgram:
    """The program of an artifact that runs, its device, and why it was chosen (docs/vulkan.md, "Which
    program"; "" where there was no choice).

    `seconds`: for each program, the seconds of its steps that were timed at this load. `largest_step`: rows
    of the largest step that the engine takes. It is below `largest_bucket`, the size that the artifact was
    built with, where memory did not suffice.
    """

    device: str
    name: str
    why: str
    seconds: Mapping[str, Mapping[str, float]]
    largest_step: int
    largest_bucket: int


@dataclass(frozen=True)
class BackendStats:
    """Figures of an engine. `running`, `waiting` and `cache_usage` (in [0, 1]) are current values; the others
    count from the engine's start. `program` is set for an engine that runs an artifact. `memory`: bytes of
    the device's memory in use, by weights, KV cache and workspaces; 0 where it is unknown. `by_model`: the
    same figures of each model, where the engine has several.
    """

    running: int
    waiting: int
    cache_usage: float
    prefix_hits: int  # in tokens
    prefix_queries: int  # in tokens
    preemptions: int
    generated_tokens: int
    prompt_tokens: int
    steps: int
    restarts: int
    program: RunningProgram | None = None
    memory: int = 0
    by_model: Mapping[str, BackendStats] = field(default_factory=dict)


class Backend(Protocol):
    """A token-level engine. All methods are called on one event loop; none blocks it."""

    info: BackendInfo

    def submit(self, request: TokenRequest) -> AsyncIterator[BackendEvent]:
        """Start a request. Closing the iterator (aclose) cancels it.

        Raises RequestError for invalid ids or a prompt that is too long, OverloadError when it cannot take
        more. The iterator raises EngineError when the engine died with the request under way.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request; nothing happens if it has ended already."""
        ...

    async def embed(self, request: EmbedRequest) -> Vector:
        """Return the vector of a sequence, as the model makes it. Cancelling the call ends the work on it.
        Raises the errors of `submit`.
        """
        ...

    async def score(self, request: ScoreRequest) -> LabelScores:
        """Return the log-probabilities of labels after a prompt; nothing is generated. Cancelling the call
        ends the work on it. Raises the errors of `submit`.
        """
        ...

    def stats(self) -> BackendStats:
        """Return the engine's current figures."""
        ...

    async def alive(self) -> bool:
        """Whether a step was computed lately, or a probe generates a token within seconds."""
        ...

    async def close(self, drain: float = 0.0) -> None:
        """Wait at most `drain` seconds for running requests, then stop."""
        ...
