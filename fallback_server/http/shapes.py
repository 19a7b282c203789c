"""OpenAI's response shapes: pieces of answers in, records for JSON out (`written` makes it: what may be long
in a record is an iterator).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from nearfar.edge_runtime.openai.pieces import Piece, whole_calls
from nearfar.edge_runtime.openai.records import TokenLogprob, TopLogprob
from nearfar.edge_runtime.tools.parts import CallPart
from nearfar.fallback_server.engines.base import TokenUsage

Record = dict[str, Any]


class Shape(Protocol):
    """How one kind of response is written."""

    def opening(self, index: int, usage: TokenUsage) -> Record | None:
        """The first chunk of an answer, if there is one before its text."""
        ...

    def chunk(self, piece: Piece, usage: TokenUsage) -> Record | None:
        """A piece as a chunk, with the tokens so far; None if it has nothing to say."""
        ...

    def whole(self, pieces: Seq[Piece], choices: int, usage: TokenUsage) -> Record:
        """All pieces as one response."""
        ...

    def final(self, usage: TokenUsage) -> Record:
        """The chunk with the usage that ends a stream."""
        ...


@dataclass(frozen=True)
class Head:
    """What all records of a response begin with.

    `usage`: a stream's chunks have the field; it is empty, or with `continuous` has the tokens so far.
    """

    id: str
    model: str
    usage: bool = False
    continuous: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def record(
        self, kind: str, choices: Iterable[Record], streamed: bool, usage: TokenUsage | None = None
    ) -> Record:
        """A record with these choices."""
        made = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if not (streamed and self.usage):
            return made
        return {**made, "usage": _usage(usage) if self.continuous and usage is not None else None}


class ChatShape:
    """Chat completions."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def opening(self, index: int, usage: TokenUsage) -> Record | None:
        """The role."""
        return self._chunk(
            {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}, usage
        )

    def chunk(self, piece: Piece, usage: TokenUsage) -> Record | None:
        """What an answer goes on with."""
        if piece.empty:
            return None
        delta: Record = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.text:
            delta["content"] = piece.text
        if piece.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.tool_calls]
        choice = {"index": piece.index, "delta": delta, "finish_reason": piece.finish}
        if piece.logprobs:
            choice["logprobs"] = _content_logprobs(piece.logprobs)
        return self._chunk(choice, usage)

    def whole(self, pieces: Seq[Piece], choices: int, usage: TokenUsage) -> Record:
        """All answers."""
        made = (self._choice(index, of) for index, of in enumerate(_by_index(pieces, choices)))
        return {**self._head.record("chat.completion", made, False), "usage": _usage(usage)}

    def final(self, usage: TokenUsage) -> Record:
        """The usage."""
        return {**self._head.record("chat.completion.chunk", [], True), "usage": _usage(usage)}

    def _choice(self, index: int, pieces: Seq[Piece]) -> Record:
        calls = merged([call for piece in pieces for call in piece.tool_calls])
        text, reasoning = "".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)
        message: Record = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = [item for piece in pieces for item in piece.logprobs]
        return {
            "index": index,
            "message": message,
            "finish_reason": pieces[-1].finish if pieces else "abort",
            "logprobs": _content_logprobs(logprobs) if logprobs else None,
        }

    def _chunk(self, choice: Record, usage: TokenUsage) -> Record:
        return self._head.record("chat.completion.chunk", [choice], True, usage)


class CompletionShape:
    """Plain completions."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def opening(self, index: int, usage: TokenUsage) -> Record | None:
        """There is none."""
        return None

    def chunk(self, piece: Piece, usage: TokenUsage) -> Record | None:
        """What a text goes on with."""
        if piece.empty:
            return None
        return self._head.record("text_completion", [self._choice(piece.index, [piece])], True, usage)

    def whole(self, pieces: Seq[Piece], choices: int, usage: TokenUsage) -> Record:
        """All texts."""
        made = (self._choice(index, of) for index, of in enumerate(_by_index(pieces, choices)))
        return {**self._head.record("text_completion", made, False), "usage": _usage(usage)}

    def final(self, usage: TokenUsage) -> Record:
        """The usage."""
        return {**self._head.record("text_completion", [], True), "usage": _usage(usage)}

    def _choice(self, index: int, pieces: Seq[Piece]) -> Record:
        logprobs = [item for piece in pieces for item in piece.logprobs]
        offsets = [offset for piece in pieces for offset in piece.offsets]
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "finish_reason": pieces[-1].finish if pieces else "abort",
            "logprobs": _parallel(logprobs, offsets) if logprobs else None,
        }


def _parallel(logprobs: Seq[TokenLogprob], offsets: list[int]) -> Record:
    """OpenAI's older shape. An upstream need not tell where tokens begin in the text: then there are no
    offsets.
    """
    return {
        "tokens": map(_name, logprobs),
        "token_logprobs": (_finite(item.logprob) for item in logprobs),
        "top_logprobs": map(_top, logprobs),
        "text_offset": offsets,
    }


def _by_index(pieces: Seq[Piece], choices: int) -> list[list[Piece]]:
    """The pieces of each answer."""
    found: list[list[Piece]] = [[] for _ in range(choices)]
    for piece in pieces:
        found[piece.index].append(piece)
    return found


def embeddings(model: str, vectors: Iterable[object], tokens: int) -> Record:
    """An embeddings response."""
    data = ({"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors))
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _usage(usage: TokenUsage) -> Record:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _call_delta(call: CallPart) -> Record:
    """A call, or what it goes on with: then it has no id and no name."""
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def merged(parts: Seq[CallPart]) -> list[Record]:
    """Whole calls of the parts in which they came."""
    whole = map(_call_delta, whole_calls(parts))
    return [{name: value for name, value in call.items() if name != "index"} for call in whole]


def _content_logprobs(logprobs: Seq[TokenLogprob]) -> Record:
    content = ({**_told(item), "top_logprobs": [*map(_told, item.top_logprobs)]} for item in logprobs)
    return {"content": content, "refusal": None}


def _told(item: TokenLogprob | TopLogprob) -> Record:
    return {"token": item.token, "logprob": _finite(item.logprob), "bytes": item.bytes}


def _top(item: TokenLogprob) -> Record | None:
    """The likeliest tokens and the token itself, which is always among them. A token without a predecessor
    has none.
    """
    if math.isnan(item.logprob):
        return None
    return {
        **{_name(other): _finite(other.logprob) for other in item.top_logprobs},
        _name(item): _finite(item.logprob),
    }


def _name(token: TokenLogprob | TopLogprob) -> str:
    """The text of a token; where it is half a character its bytes, for texts are keys here and must
    differ.
    """
    if "\ufffd" in token.token and token.bytes:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.token


def _finite(value: float) -> float | None:
    """JSON has no infinity: OpenAI writes -9999. A token without a predecessor has none (NaN)."""
    if math.isnan(value):
        return None
    return max(value, -9999.0)
