"""Anthropic's Messages API: the shape of an answer, as one message and as a stream of named events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import FinishReason
from nearfar.edge_runtime.tools.parts import CallPart
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.answering import check_ended
from nearfar.fallback_server.http.errors import Problem
from nearfar.fallback_server.http.paths import MESSAGES
from nearfar.fallback_server.http.shapes import Record
from nearfar.fallback_server.http.streams import EVENTS, event

_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal",
}  # fmt: skip


class MessageShape:
    """One message: blocks of thinking, text and calls."""

    media_type = EVENTS

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[Record] = []
        self._arguments: dict[int, str] = {}
        self._open = False
        self._finish: FinishReason = "stop"
        self._stopped: str | None = None

    def model_is(self, model: str) -> None:
        """See ResponseWriter."""
        self._model = model

    def begin(self, usage: TokenUsage) -> Iterable[bytes]:
        """See ResponseWriter."""
        yield _event("message_start", message=self._message(usage, None))

    def piece(self, piece: Piece, usage: TokenUsage) -> Iterable[bytes]:
        """See ResponseWriter."""
        for name, fields in self._taken(piece):
            yield _event(name, **fields)

    def end(self, usage: TokenUsage) -> Sequence[bytes]:
        """See ResponseWriter."""
        events = [_event(name, **fields) for name, fields in self._closed()]
        delta = {"stop_reason": self._reason, "stop_sequence": self._stopped}
        return [*events, _event("message_delta", delta=delta, usage=_usage(usage)), _event("message_stop")]

    def failed(self, problem: Problem) -> Iterable[bytes]:
        """See ResponseWriter."""
        yield event(problem.told(MESSAGES), "error")

    def whole(self, pieces: Sequence[Piece], usage: TokenUsage) -> Record:
        """See ResponseWriter."""
        for piece in pieces:
            for _ in self._taken(piece):
                pass
        for _ in self._closed():
            pass
        return self._message(usage, self._reason)

    @property
    def _reason(self) -> str:
        return "stop_sequence" if self._stopped is not None else _REASONS[self._finish]

    def _message(self, usage: TokenUsage, reason: str | None) -> Record:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model,
            "content": list(self._blocks), "stop_reason": reason, "stop_sequence": self._stopped,
            "usage": _usage(usage),
        }  # fmt: skip

    def _taken(self, piece: Piece) -> Iterator[tuple[str, Record]]:
        check_ended(piece)
        if piece.reasoning:
            yield from self._grown("thinking", piece.reasoning, {"signature": ""})
        if piece.text:
            yield from self._grown("text", piece.text, {})
        for call in piece.tool_calls:
            yield from self._called(call)
        self._finish = piece.finish or self._finish
        self._stopped = piece.stopped_by or self._stopped

    def _grown(self, kind: str, text: str, more: Record) -> Iterator[tuple[str, Record]]:
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._closed()
            yield from self._begun({"type": kind, kind: "", **more})
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _called(self, call: CallPart) -> Iterator[tuple[str, Record]]:
        if call.id:
            yield from self._closed()
            yield from self._begun({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        at = len(self._blocks) - 1
        self._arguments[at] = self._arguments.get(at, "") + call.arguments
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begun(self, block: Record) -> Iterator[tuple[str, Record]]:
        self._blocks.append(block)
        self._open = True
        yield "content_block_start", {"index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: Record) -> tuple[str, Record]:
        return "content_block_delta", {"index": len(self._blocks) - 1, "delta": delta}

    def _closed(self) -> Iterator[tuple[str, Record]]:
        """Close the open block. Arguments that were cut off become {} where they are not JSON."""
        if not self._open:
            return
        self._open = False
        at = len(self._blocks) - 1
        if (text := self._arguments.get(at)) is not None:
            self._blocks[at]["input"] = _object(text)
        yield "content_block_stop", {"index": at}


def _object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:  # max_tokens cut the call
        return {}


def _usage(usage: TokenUsage) -> Record:
    """Return the usage as Anthropic counts it: cached prompt tokens are separate from the others."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _event(kind: str, /, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
