"""The text-level protocol between the HTTP side and an engine: prepare, submit, stream, cancel, stats."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.tools.asking import AUTO, ToolChoice
from nearfar.fallback_server.backend import BackendStats, LabelScores, Pooling
from nearfar.fallback_server.engines.hints import Hint
from nearfar.fallback_server.tenants import ANONYMOUS, Tenant

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A prompt, as messages or as text or tokens, and the labels whose probabilities after it are wanted.

    `place`, `labels_place`: where the request has the prompt and the list of labels, for errors. `longest`:
    where it has the longest part of the prompt, for errors about the length; by default `place`.
    """

    labels: tuple[Prompt, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: Prompt = ""
    place: str = "input"
    labels_place: str = "labels"
    longest: str = ""


@dataclass(frozen=True)
class EngineRequest:
    """One validated API call. It has `messages` (chat), `prompts` (completions, embeddings) or `questions`.

    `sampling`: the fields of Sampling that the caller gave; the model has defaults for the others.
    `max_tokens` None means until the context is full. `body` is the call as received, for engines that pass
    it on. `tenant`: whose request it is; its salt keeps its prefixes apart from others'. `pooling` is set for
    a request for vectors (ServerEngine.embed), `questions` for a request for log-probabilities
    (ServerEngine.score). `begin_answer`: the chat template begins the answer. `hints` say how much to think
    and to write, which a chat template may follow. `token_ids`: the answers have the token ids of the prompt
    and of the text. `tokens_as_ids`: log-probabilities name each token by its id. `prompt_logprobs`: the
    answers have the log-probabilities of the prompt's tokens, with that many likeliest tokens each.
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
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    echo: bool = False
    priority: int = 0
    tenant: Tenant = ANONYMOUS
    pooling: Pooling | None = None
    questions: tuple[Question, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    hints: tuple[Hint, ...] = ()
    continue_last: bool = False
    begin_answer: bool = True
    split_reasoning: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)
    most_tokens: int | None = None
    """For a request that only asks for the tokens of its prompt: how many tokens the client can take; 0 if it
    wants their number alone. The prompt may then be empty, or longer than the context.
    """
    passed: bool = False
    """Whether the client takes the events of `body`'s API as an upstream sends them."""
    without: str = ""
    """The model that failed, where `model` stands for several: another one is chosen."""

    @property
    def chat(self) -> bool:
        """Whether the request is a chat completion."""
        return bool(self.messages)

    @property
    def texts(self) -> Seq[Any]:
        """What the request asks, for the audit log."""
        return self.messages or self.prompts or [each.messages or each.prompt for each in self.questions]

    @property
    def choices(self) -> int:
        """The number of answers that the request asks for."""
        return self.n * max(len(self.prompts), 1)

    @property
    def stream_options(self) -> Mapping[str, Any]:
        """The options of a stream that the client gave."""
        options = self.body.get("stream_options")
        return options if isinstance(options, Mapping) else {}

    @property
    def usage_asked(self) -> bool:
        """Whether the client wants the usage in a stream: `include_usage` alone says it, if it is given."""
        asked = self.stream_options.get("include_usage")
        return bool(self.stream_options.get("continuous_usage_stats") if asked is None else asked)


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of a request so far; `cached` counts the prompt tokens found in the cache. `queued`: the seconds
    that it waited for its first step; None while that is unknown, as it is of upstream servers.
    """

    prompt: int
    completion: int = 0
    cached: int = 0
    queued: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Prepared:
    """A request that an engine will take, with its prompts as tokens.

    `prompt_tokens` counts each prompt once. Engines without a tokenizer estimate it (`estimated`), leave
    `prompts` empty, and give the first characters of the prompt as `beginning`. `labels`, by prompt: tokens
    of the labels to score after it; they count as tokens of the prompt.
    """

    request: EngineRequest
    prompts: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    grammar: Grammar | None = None
    reasoning_open: bool = False
    ignored: tuple[str, ...] = ()
    """Fields of the request without effect: hints that the chat template does not follow."""
    beginning: str = ""
    labels: tuple[tuple[tuple[int, ...], ...], ...] = ()
    estimated: bool = False


class Answers(Protocol):
    """The answers of one request as they are generated."""

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield pieces of all answers as they come; to be iterated once."""
        ...

    @property
    def ignored(self) -> str:
        """The fields of the request that an upstream ignored, as its header names them; known with the first
        piece.
        """
        ...

    async def aclose(self) -> None:
        """Cancel what still runs. Must be called in any case, whether the pieces were iterated or not."""
        ...

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far."""
        ...


@dataclass(frozen=True)
class ModelInfo:
    """A model that the engine serves. `context_length` 0: unknown. `here`: the model is computed on this
    machine. `stands_for`: the models of which the engine chooses one for each request under this name; empty
    for the name of one model.
    """

    id: str
    context_length: int = 0
    here: bool = False
    stands_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class EmbeddingVectors:
    """One vector per input, as the model makes it (its length need not be 1), and the tokens of all
    inputs. `ignored`: the fields of the request that an upstream ignored, as its header names them.
    """

    vectors: Seq[Vector]
    tokens: int
    ignored: str = ""


@dataclass(frozen=True)
class Scores:
    """The log-probabilities of the labels of each question, and the tokens of all prompts and labels."""

    found: Seq[LabelScores]
    labels: Seq[Seq[tuple[int, ...]]]
    """The tokens of the labels."""
    tokens: int


@dataclass(frozen=True)
class Unready:
    """Why an engine is not ready. `details` name addresses and are for the operator only."""

    said: str
    details: str = ""


GENERATES_NOTHING = Unready("not ready: no token generated recently")


class ServerEngine(Protocol):
    """The interface of everything that answers requests. All methods are called on one event loop; none
    blocks it.

    `passes_on`: the engine forwards requests to servers that may know fields and message parts unknown here.
    """

    passes_on: bool

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the models that the engine serves; the first is the default."""
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

    async def embed(self, prepared: Prepared) -> EmbeddingVectors:
        """Return one vector for each prompt of a request with `pooling`. Cancelling the call ends the
        work.
        """
        ...

    async def score(self, prepared: Prepared) -> Scores:
        """Return the log-probabilities of the labels of a request with `questions`. Cancelling the call ends
        the work. Raises RequestError where the model is not here.
        """
        ...

    async def text_of(self, tokens: Seq[int]) -> str:
        """Return the text of tokens, special tokens included. Raises RequestError where the model's tokenizer
        is not here.
        """
        ...

    async def names_of(self, tokens: Seq[int]) -> list[str]:
        """Return each token in the vocabulary's spelling. Raises RequestError as `text_of` does."""
        ...

    def stats(self) -> BackendStats:
        """Return the engine's current figures."""
        ...

    async def ready(self) -> bool:
        """Whether the engine computed lately, or generates a token within seconds."""
        ...

    def unready(self) -> Unready:
        """Why the last call of `ready` gave False."""
        ...

    async def close(self, drain: float = 0.0) -> None:
        """Wait at most `drain` seconds for requests under way, then stop."""
        ...
