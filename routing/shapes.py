"""What the hybrid client answers: OpenAI's shapes as plain records, with `x_nearfar` beside them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from nearfar.edge_runtime.openai.records import Logprobs, Record, TokenLogprob, Usage
from nearfar.routing.types import Reason, Side


@dataclass(frozen=True)
class Provenance(Record):
    """Where an answer came from and why.

    `route`: the side that gave its end; `path`: all sides that gave a part of it, in order. `degraded`: the
    device answered, though the cloud was wanted. `spent`, `saved`: what the cloud has cost, and what it would
    have cost beyond that, in the policy's unit; both are known with the last chunk. `would_route`: of shadow
    mode.
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
    """A piece of a streamed response. The first and the last have `x_nearfar`; one with usage has no
    choices.
    """

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

    `count`: tokens that it stands for. `calls`: deltas of tool calls as they came. The last piece has a
    `finish`; one with `usage` may come after it.
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
