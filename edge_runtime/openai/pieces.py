"""Pieces of an answer that are certain: one record for engines, upstream servers and clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from nearfar.edge_runtime.openai.records import (
    ChoiceDelta,
    FinishReason,
    FunctionCall,
    FunctionDelta,
    Message,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from nearfar.edge_runtime.tools.parts import CallPart


@dataclass(frozen=True)
class RankedLogprob:
    """A token's log-probability, with its place among all tokens; the likeliest has 1, and None is
    unknown.
    """

    token: str
    logprob: float
    rank: int | None


@dataclass(frozen=True)
class PromptTokens:
    """What an answer of a server says of its prompt's tokens. `ids`: their ids; None: not asked for.

    `logprobs`: for each token its log-probability and those of the likeliest tokens, by their ids, with the
    token itself first; None for the first token of the prompt. Empty: not asked for.
    """

    ids: tuple[int, ...] | None = None
    logprobs: tuple[Mapping[int, RankedLogprob] | None, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of one answer that is certain. The last piece has `finish`. `tokens`: the number of tokens it
    stands for.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallPart, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    tokens: int = 0
    offsets: tuple[int, ...] = ()
    """Characters of the whole text before each token of `logprobs`; empty if unknown."""
    stopped_by: str | None = None
    """The stop string that ended the answer; None also if a server does not say."""
    ids: tuple[int, ...] = ()
    """The piece's token ids, with the end token, where the request asks a server for them."""
    prompt: PromptTokens | None = None
    """The prompt's tokens, with the first piece of an answer, where the request asks a server for them."""

    @property
    def empty(self) -> bool:
        """Whether the piece has no part of the answer."""
        parts = self.text or self.reasoning or self.tool_calls or self.logprobs or self.ids
        return not (parts or self.finish)


def joined(index: int, pieces: Seq[Piece]) -> Piece:
    """Join the pieces of an answer to one, with whole calls."""
    return Piece(
        index,
        "".join(piece.text for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(whole_calls(call for piece in pieces for call in piece.tool_calls)),
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        next((piece.finish for piece in reversed(pieces) if piece.finish), None),
        sum(piece.tokens for piece in pieces),
        tuple(offset for piece in pieces for offset in piece.offsets),
        ids=tuple(token for piece in pieces for token in piece.ids),
    )


def whole_calls(parts: Iterable[CallPart]) -> list[CallPart]:
    """Join parts of calls to whole calls. Id and name come from the first part that has them."""
    whole: dict[int, CallPart] = {}
    for part in parts:
        if (begun := whole.get(part.index)) is not None:
            arguments = begun.arguments + part.arguments
            part = replace(begun, id=begun.id or part.id, name=begun.name or part.name, arguments=arguments)
        whole[part.index] = part
    return [whole[index] for index in sorted(whole)]


def message_of(piece: Piece) -> Message:
    """The message of a whole answer."""
    calls = [ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in piece.tool_calls]
    return Message(
        None if calls and not piece.text else piece.text,
        reasoning_content=piece.reasoning or None,
        tool_calls=calls or None,
    )


def delta_of(piece: Piece) -> ChoiceDelta:
    """The delta of a chunk with this piece."""
    calls = [_call_delta(call) for call in piece.tool_calls] or None
    return ChoiceDelta(piece.text or None, reasoning_content=piece.reasoning or None, tool_calls=calls)


def _call_delta(call: CallPart) -> ToolCallDelta:
    function = FunctionDelta(call.name or None, call.arguments)
    return ToolCallDelta(call.index, call.id or None, function, "function" if call.id else None)
