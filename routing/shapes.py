"""What the hybrid client answers: OpenAI's shapes as plain records, with `x_nearfar` beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from nearfar.edge_runtime.types import Logprobs, Record, TokenLogprob, TopLogprob, Usage
from nearfar.routing.types import Reason, Side


@dataclass(frozen=True)
class Provenance(Record):
    """Where an answer came from and why.

    `route`: the side that gave its end; `path`: all sides that gave a part of it, in order. `degraded`: the device answered,
    though the cloud was wanted. `spent`, `saved`: what the cloud has cost, and what it would have cost beyond that, in the
    policy's unit; both are known with the last chunk. `would_route`: of shadow mode.
    """

    route: Side | None
    reasons: list[Reason]
    degraded: bool
    decision_id: str
    path: list[Side]
    spent: float | None = None
    saved: float | None = None
    would_route: Side | None = None


@dataclass(frozen=True)
class Function(Record):
    """A function that the model calls. In chunks the arguments come bit by bit."""

    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolCall(Record):
    """A call, or in chunks a part of one."""

    function: Function
    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = "function"


@dataclass(frozen=True)
class Message(Record):
    """An answer."""

    content: str | None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    role: Literal["assistant"] = "assistant"
    refusal: None = None


@dataclass(frozen=True)
class Choice(Record):
    """The one answer of a completion."""

    message: Message
    finish_reason: str
    logprobs: Logprobs | None = None
    index: int = 0


@dataclass(frozen=True)
class ChatCompletion(Record):
    """A whole response."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    x_nearfar: Provenance
    object: Literal["chat.completion"] = "chat.completion"


@dataclass(frozen=True)
class Delta(Record):
    """What a chunk adds."""

    content: str | None = None
    role: Literal["assistant"] | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True)
class ChunkChoice(Record):
    """A piece of the answer."""

    delta: Delta
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    index: int = 0


@dataclass(frozen=True)
class ChatCompletionChunk(Record):
    """A piece of a streamed response. The first and the last have `x_nearfar`; one with usage has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    x_nearfar: Provenance | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


@dataclass(frozen=True)
class Piece:
    """What a side adds to an answer: the client's own record, before it has a shape.

    `count`: tokens that it stands for. `calls`: deltas of tool calls as they came. The last piece has a `finish`; one with
    `usage` may come after it.
    """

    text: str = ""
    count: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str | None = None
    usage: Usage | None = None

    @property
    def useful(self) -> bool:
        """Whether it has anything of the answer."""
        return bool(self.text or self.reasoning or self.calls or self.finish or self.logprobs)

    def delta(self) -> Delta:
        """As a chunk's delta."""
        return Delta(self.text or None, None, list(self.calls) or None, self.reasoning or None)


def piece_of(choice: Mapping[str, Any]) -> Piece:
    """A choice of a streamed chunk as JSON. KeyError, TypeError where it has not OpenAI's shape."""
    delta = choice.get("delta") or {}
    text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = tuple(_call(item) for item in delta.get("tool_calls") or ())
    logprobs = tuple(_logprob(item) for item in (choice.get("logprobs") or {}).get("content") or ())
    count = len(logprobs) or int(bool(text or reasoning or calls))
    return Piece(text, count, logprobs, reasoning, calls, choice.get("finish_reason"))


def usage_of(usage: Mapping[str, Any]) -> Usage:
    """A usage record as JSON."""
    prompt, completion = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    return Usage(prompt, completion, prompt + completion)


def whole_calls(deltas: Iterable[ToolCall]) -> list[ToolCall]:
    """Calls of the parts in which they came."""
    parts: dict[int, list[ToolCall]] = {}
    for delta in deltas:
        parts.setdefault(delta.index or 0, []).append(delta)
    return [_joined(parts[index]) for index in sorted(parts)]


def _joined(parts: Seq[ToolCall]) -> ToolCall:
    name = next((part.function.name for part in parts if part.function.name), None)
    arguments = "".join(part.function.arguments for part in parts)
    return ToolCall(Function(name, arguments), None, next((part.id for part in parts if part.id), None))


def _call(item: Mapping[str, Any]) -> ToolCall:
    function = item.get("function") or {}
    made = Function(function.get("name"), function.get("arguments") or "")
    return ToolCall(made, item.get("index"), item.get("id"), item.get("type"))


def _logprob(item: Mapping[str, Any]) -> TokenLogprob:
    top = [TopLogprob(other["token"], other["logprob"], other.get("bytes") or []) for other in item.get("top_logprobs") or ()]
    return TokenLogprob(item["token"], item["logprob"], item.get("bytes") or [], top)
