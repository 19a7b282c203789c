"""OpenAI's response records as dataclasses."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from nearfar.edge_runtime.engine.requests import RequestStats

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "abort"]
"""The reason why an answer ended. The last two come from servers only."""


class Record:
    """A record with attribute access as in OpenAI's client, and its two methods to serialize it."""

    def model_dump(self) -> dict[str, Any]:
        """The record as nested dictionaries."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]

    def model_dump_json(self) -> str:
        return json.dumps(self.model_dump(), ensure_ascii=False)


@dataclass(frozen=True)
class PromptTokensDetails(Record):
    """Prompt tokens that were in the cache; messages that the context policy left out of the prompt (None:
    none).
    """

    cached_tokens: int = 0
    left_out_messages: int | None = None


@dataclass(frozen=True)
class Usage(Record):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = dataclasses.field(default_factory=PromptTokensDetails)


@dataclass(frozen=True)
class TopLogprob(Record):
    """An alternative to a token, with its log probability."""

    token: str
    logprob: float
    bytes: list[int]


@dataclass(frozen=True)
class TokenLogprob(Record):
    """A token of the answer with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def logprob_record(item: TokenLogprob) -> dict[str, Any]:
    """A token's log-probability as JSON, in the shape of chat completions."""
    return {**_bare(item), "top_logprobs": [_bare(other) for other in item.top_logprobs]}


def finite(value: float) -> float | None:
    """A log-probability for JSON, which has no infinity: OpenAI writes -9999. NaN becomes None (a prompt's
    first token).
    """
    return None if math.isnan(value) else max(value, -9999.0)


def _bare(item: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": item.token, "logprob": finite(item.logprob), "bytes": item.bytes}


@dataclass(frozen=True)
class ChoiceLogprobs(Record):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprob]
    refusal: None = None


@dataclass(frozen=True)
class FunctionCall(Record):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCall(Record):
    """A call that the model requests."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


@dataclass(frozen=True)
class FunctionDelta(Record):
    """The name of a function, or a piece of its arguments."""

    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta(Record):
    """A chunk's addition to a call: first id, type and name, then the JSON of its arguments
    piece by piece.

    `index` counts the calls of an answer.
    """

    index: int
    id: str | None
    function: FunctionDelta
    type: Literal["function"] | None


@dataclass(frozen=True)
class Message(Record):
    """An answer. `content` is None if it consists of calls only."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


@dataclass(frozen=True)
class Choice(Record):
    """One answer of a chat completion."""

    index: int
    message: Message
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None


@dataclass(frozen=True)
class ChatCompletion(Record):
    """A whole chat response. `timings` is nearfar's own field: one record for each choice."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    timings: list[RequestStats]
    object: Literal["chat.completion"] = "chat.completion"


@dataclass(frozen=True)
class ChoiceDelta(Record):
    """A chunk's addition to an answer."""

    content: str | None = None
    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


@dataclass(frozen=True)
class ChunkChoice(Record):
    """A piece of one answer."""

    index: int
    delta: ChoiceDelta
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None


@dataclass(frozen=True)
class ChatCompletionChunk(Record):
    """A chunk of a streamed chat response. The last one may have usage, and then has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: list[RequestStats] | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


@dataclass(frozen=True)
class CompletionLogprobs(Record):
    """Log-probabilities of a plain completion, in the older parallel-list shape."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


@dataclass(frozen=True)
class CompletionChoice(Record):
    """One text of a completion, or a part of it when streamed."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None


@dataclass(frozen=True)
class Completion(Record):
    """A completion, or a chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: list[RequestStats] | None = None
    object: Literal["text_completion"] = "text_completion"


@dataclass(frozen=True)
class InputEmbedding(Record):
    """The embedding of one input: float32 values of L2 length 1, or base64 of them."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


@dataclass(frozen=True)
class EmbeddingUsage(Record):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class CreateEmbeddingResponse(Record):
    """Embeddings, in the order of the inputs."""

    data: list[InputEmbedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
