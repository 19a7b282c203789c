"""The hybrid client's answers: OpenAI's shapes as plain records, with an additional field `x_nearfar`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nearfar.edge_runtime.openai import pieces
from nearfar.edge_runtime.openai.records import Choice, ChunkChoice, Record, Usage
from nearfar.routing.types import Reason, Side


@dataclass(frozen=True)
class Provenance(Record):
    """Where an answer came from and why.

    `route`: the side that gave its end; `path`: all sides that gave a part of it, in order. `degraded`: the
    device answered though the cloud was wanted. `spent`, `saved`: the cloud's cost, and what it would have
    cost beyond that, in the policy's unit; both come with the last chunk. `would_route`: the route without
    shadow mode.
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
class UsagePiece(pieces.Piece):
    """A side's addition to an answer, before it has a shape. One with `usage` may come after the last one."""

    usage: Usage | None = None
