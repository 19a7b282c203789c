"""OpenAI's Responses API: the shape of an answer, as one response and as a stream of named events.

A response has items: reasoning, a message, calls. Each event of a stream has a sequence number. An item is
added, its parts and texts come in deltas, then text, part and item are sent again whole.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import FinishReason
from nearfar.edge_runtime.tools.parts import CallPart
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.apis.responses import ResponseRequest
from nearfar.fallback_server.http.errors import Problem
from nearfar.fallback_server.http.shapes import Record, content_logprobs
from nearfar.fallback_server.http.streams import EVENTS, event

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "cancelled"}
"""The reason in `incomplete_details`, by the answer's finish reason."""


@dataclass
class _Item:
    """An item under construction. `kind`: reasoning, message or function_call; `text`: its text, or a call's
    arguments.
    """

    kind: str
    index: int
    id: str
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    call: CallPart | None = None
    namespace: str | None = None
    name: str = ""

    def record(self, status: str) -> Record:
        """The item as JSON."""
        head: Record = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self.text}] if self.text else []
            return {**head, "summary": [], "content": content}
        if self.kind == "message":
            parts = [self.part] if self.text or status != "in_progress" else []
            return {**head, "role": "assistant", "content": parts}
        assert self.call is not None
        named = {"namespace": self.namespace} if self.namespace else {}
        return {**head, "call_id": self.call.id, "name": self.name, **named, "arguments": self.text}

    @property
    def part(self) -> Record:
        """The content part with the text of a message or a reasoning item."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class ResponseShape:
    """The shape of one response. `told` receives the whole record once the response has ended."""

    media_type = EVENTS

    def __init__(
        self,
        name: str,
        model: str,
        body: ResponseRequest,
        stored: bool,
        told: Callable[[Record], object] = lambda record: None,
    ) -> None:
        self.id, self._model, self._told = name, model, told
        self._functions = body.functions
        self._request = _echo(body, stored)
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._calls: dict[int, _Item] = {}
        self._reasoned = 0
        self._finish: FinishReason | None = None
        self._sequence = 0

    def begin(self, usage: TokenUsage) -> Iterable[bytes]:
        """See Shape."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._record("in_progress", None))

    def piece(self, piece: Piece, usage: TokenUsage) -> Iterable[bytes]:
        """See Shape."""
        for name, fields in self._taken(piece):
            yield self._event(name, **fields)

    def end(self, usage: TokenUsage) -> Sequence[bytes]:
        """See Shape."""
        events = [self._event(name, **fields) for name, fields in self._closed()]
        record = self._ended(usage)
        kind = "response.completed" if record["status"] == "completed" else "response.incomplete"
        return [*events, self._event(kind, response=record)]

    def failed(self, problem: Problem) -> Iterable[bytes]:
        """See Shape."""
        error = {"code": problem.code or "server_error", "message": problem.message}
        record = {**self._record("failed", None), "error": error}
        yield self._event("response.failed", response=record)
        yield self._event("error", **error, param=problem.param)

    def whole(self, pieces: Sequence[Piece], usage: TokenUsage) -> Record:
        """See Shape."""
        for piece in pieces:
            for _ in self._taken(piece):
                pass
        for _ in self._closed():
            pass
        return self._ended(usage)

    def _ended(self, usage: TokenUsage) -> Record:
        reason = _INCOMPLETE.get(self._finish or "stop")
        made = self._record("completed" if reason is None else "incomplete", usage)
        if reason is not None:
            made["incomplete_details"] = {"reason": reason}
        self._told(made)
        return made

    def _taken(self, piece: Piece) -> Iterator[tuple[str, Record]]:
        """Add a piece to the items, and yield its events."""
        if piece.reasoning:
            self._reasoned += piece.tokens
            yield from self._grown("reasoning", piece.reasoning)
        if piece.text or piece.logprobs:
            logprobs = list(content_logprobs(piece.logprobs)["content"]) if piece.logprobs else []
            yield from self._grown("message", piece.text, logprobs)
        for call in piece.tool_calls:
            yield from self._called(call)
        self._finish = piece.finish or self._finish

    def _grown(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> Iterator[tuple[str, Record]]:
        if self._open is None or self._open.kind != kind:
            yield from self._closed()
            yield from self._begun(kind)
        item = self._open
        assert item is not None
        item.text += text
        item.logprobs += logprobs
        at = {"item_id": item.id, "output_index": item.index, "content_index": 0, "delta": text}
        if kind == "message":
            yield "response.output_text.delta", {**at, "logprobs": list(logprobs)}
        else:
            yield "response.reasoning_text.delta", at

    def _called(self, call: CallPart) -> Iterator[tuple[str, Record]]:
        if call.id:
            yield from self._closed()
            namespace, name = self._functions.get(call.name, (None, call.name))
            item = _Item("function_call", len(self._items), _id("fc"), "", [], call, namespace, name)
            self._items.append(item)
            self._open = self._calls[call.index] = item
            yield "response.output_item.added", {
                "output_index": item.index, "item": item.record("in_progress")
            }  # fmt: skip
        item = self._calls[call.index]
        item.text += call.arguments
        if call.arguments:
            at = {"item_id": item.id, "output_index": item.index}
            yield "response.function_call_arguments.delta", {**at, "delta": call.arguments}

    def _begun(self, kind: str) -> Iterator[tuple[str, Record]]:
        prefix = "rs" if kind == "reasoning" else "msg"
        item = self._open = _Item(kind, len(self._items), _id(prefix))
        self._items.append(item)
        at = {"output_index": item.index}
        yield "response.output_item.added", {**at, "item": item.record("in_progress")}
        yield "response.content_part.added", {
            **at, "item_id": item.id, "content_index": 0, "part": item.part
        }  # fmt: skip

    def _closed(self) -> Iterator[tuple[str, Record]]:
        """Close the open item, and yield the events with its whole content."""
        item, self._open = self._open, None
        if item is None:
            return
        at = {"item_id": item.id, "output_index": item.index}
        if item.kind == "function_call":
            done = {**at, "name": item.name, "arguments": item.text}
            yield "response.function_call_arguments.done", done
        else:
            part = {**at, "content_index": 0}
            texts = {"text": item.text, **({"logprobs": item.logprobs} if item.kind == "message" else {})}
            kind = "output_text" if item.kind == "message" else "reasoning_text"
            yield f"response.{kind}.done", {**part, **texts}
            yield "response.content_part.done", {**part, "part": item.part}
        status = "incomplete" if self._finish in _INCOMPLETE else "completed"
        yield "response.output_item.done", {"output_index": item.index, "item": item.record(status)}

    def _record(self, status: str, usage: TokenUsage | None) -> Record:
        ended = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [item.record("completed") for item in self._items] if ended else [],
            **self._request,
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: TokenUsage) -> Record:
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._reasoned},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        made = event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return made


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _echo(body: ResponseRequest, stored: bool) -> Mapping[str, Any]:
    """Return the fields of a response that repeat its request."""
    dumped = body.model_dump(exclude_none=True, by_alias=True)
    text = dumped.get("text") or {}
    reasoning = dumped.get("reasoning") or {}
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": stored,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": dumped.get("tool_choice", "auto"),
        "tools": dumped.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
