"""The text-level protocol between the HTTP side and an engine: submit, stream, cancel, stats."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.tools.asking import AUTO, ToolChoice
from nearfar.fallback_server.backend import BackendStats, Pooling
from nearfar.fallback_server.tenants import ANONYMOUS, Tenant

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class EngineRequest:
    """One call of the API, validated. Either `messages` (chat) or `prompts` (completions, embeddings) is
    given.

    `sampling`: fields of Sampling, those that the caller gave; the model says the others. `max_tokens` None:
    until the context is full. `body` is the call as it came, for engines that pass it on.
    `tenant` is for whom it is answered: its salt keeps its prefixes apart from those of others. `pooling`:
    vectors of the prompts are wanted (Engine.embed), no answers. `hints` are reasoning_effort and verbosity,
    which a chat template follows or not.
    """

    id: str
    model: str
    messages: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[Prompt, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = AUTO
    grammar: Grammar | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    priority: int = 0
    tenant: Tenant = ANONYMOUS
    pooling: Pooling | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    continue_last: bool = False
    split_reasoning: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """Whether this is a chat completion."""
        return bool(self.messages)

    @property
    def choices(self) -> int:
        """How many answers it asks for."""
        return self.n * max(len(self.prompts), 1)


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of a request so far; `cached` are those of the prompt that were in the cache."""

    prompt: int
    completion: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Prepared:
    """A request that an engine will take: its prompts as tokens.

    `prompt_tokens` counts each prompt once. For engines that do not tokenize it is an estimate, `prompts` is
    empty, and `beginning` is how what the prompt says begins.
    """

    request: EngineRequest
    prompts: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    grammar: Grammar | None = None
    reasoning_open: bool = False
    beginning: str = ""


class Answers(Protocol):
    """The answers of one request on their way."""

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces of all answers as they come, to be iterated once."""
        ...

    async def aclose(self) -> None:
        """Cancel what is still going. To be called in any case, whether the pieces were iterated or not."""
        ...

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far."""
        ...


@dataclass(frozen=True)
class ModelInfo:
    """A model that can be asked for. `context_length` 0: not known. `here`: it is computed on this
    machine.
    """

    id: str
    context_length: int = 0
    here: bool = False


@dataclass(frozen=True)
class Embeddings:
    """One vector an input, as the model makes it (its length need not be 1), and the tokens of all inputs."""

    vectors: Seq[Vector]
    tokens: int


@dataclass(frozen=True)
class Unready:
    """Why an engine is not ready. `details` are for whoever runs the server: they name addresses."""

    said: str
    details: str = ""


GENERATES_NOTHING = Unready("not ready: no token generated recently")


class Engine(Protocol):
    """What answers requests. All methods are called on one event loop; none blocks it.

    `passes_on`: it gives requests to servers that may know fields and parts of messages unknown here.
    """

    passes_on: bool

    def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for; the first is the default."""
        ...

    async def prepare(self, request: EngineRequest) -> Prepared:
        """Check and tokenize a request. Raises RequestError, OverloadError; nothing runs yet."""
        ...

    async def submit(self, prepared: Prepared) -> Answers:
        """Start a request. Raises RequestError, OverloadError, EngineError before there is a first piece."""
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request; nothing happens if it has ended already."""
        ...

    async def embed(self, prepared: Prepared) -> Embeddings:
        """One vector for each prompt of a request with `pooling`. Cancelling the call ends the work."""
        ...

    def stats(self) -> BackendStats:
        """The figures now."""
        ...

    async def ready(self) -> bool:
        """Whether it computed lately, or generates a token now, within seconds."""
        ...

    def unready(self) -> Unready:
        """Why it was not ready when it was asked last."""
        ...

    async def close(self, drain: float = 0.0) -> None:
        """Wait at most `drain` seconds for requests under way, then stop."""
        ...
