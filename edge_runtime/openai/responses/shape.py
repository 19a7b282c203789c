"""OpenAI's Responses API: the records of an answer, as one response and as the events of a stream.

A response has items: reasoning, a message, calls. Each event of a stream has a sequence number. An item is
added, its parts and texts come in deltas, then text, part and item are sent again whole.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import FinishReason, logprob_record
from nearfar.edge_runtime.openai.responses.asking import Record, functions_of
from nearfar.edge_runtime.tools.parts import CallPart

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": "cancelled"}
"""The reason in `incomplete_details`, by the answer's finish reason."""
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
"""How the id of an item begins, by its type."""


class TokenCounts(NamedTuple):
    """Tokens of a request so far; `cached` counts the prompt tokens found in the cache."""

    prompt: int
    completion: int = 0
    cached: int = 0


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
    status: str = "in_progress"

    def record(self) -> Record:
        """The item as JSON."""
        head: Record = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self.text}] if self.text else []
            return {**head, "summary": [], "content": content}
        if self.kind == "message":
            parts = [self.part] if self.text or self.status != "in_progress" else []
            return {**head, "role": "assistant", "content": parts}
        assert self.call is not None
        named = {"namespace": self.namespace} if self.namespace else {}
        return {**head, "call_id": self.call.id, "name": self.name, **named, "arguments": self.text}

    @property
    def part(self) -> Record:
        """The content part with the text of a message or a reasoning item."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": [*self.logprobs]}


def new_id(prefix: str) -> str:
    """A random id that begins with `prefix`."""
    return f"{prefix}_{secrets.token_hex(16)}"


class ResponseRecords:
    """The records of one response, from the pieces of its answer.

    `body`: the request, checked, without absent fields. `stored`: whether the response is kept. `told`
    receives the whole record once the response has ended. `ids` makes the id of an item from its prefix.
    """

    def __init__(
        self,
        name: str,
        model: str,
        body: Mapping[str, Any],
        stored: bool,
        told: Callable[[Record], object] = lambda record: None,
        *,
        ids: Callable[[str], str] = new_id,
    ) -> None:
        self.id, self.model, self._told, self._ids = name, model, told, ids
        self._functions = functions_of(body.get("tools") or ())
        self._request = _echo(body, stored)
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._calls: dict[int, _Item] = {}
        self._reasoned = 0
        self._finish: FinishReason | None = None
        self._sequence = 0

    def begin(self) -> Iterator[Record]:
        """Yield the events before the first piece."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._record("in_progress", None))

    def piece(self, piece: Piece) -> Iterator[Record]:
        """Yield the events of a piece of the answer."""
        for name, fields in self._taken(piece):
            yield self._event(name, **fields)

    def end(self, usage: TokenCounts) -> list[Record]:
        """Return the last events of the response."""
        events = [self._event(name, **fields) for name, fields in self._closed()]
        record = self._ended(usage)
        kind = "response.completed" if record["status"] == "completed" else "response.incomplete"
        return [*events, self._event(kind, response=record)]

    def failed(self, code: str | None, message: str, param: str | None) -> Iterator[Record]:
        """Yield the events of an answer that failed after its beginning. The response has what was sent."""
        if self._open is not None:
            self._open.status = "incomplete"
        error = {"code": code or "server_error", "message": message}
        record = {**self._record("failed", None), "error": error}
        yield self._event("response.failed", response=record)
        yield self._event("error", **error, param=param)

    def whole(self, pieces: Iterable[Piece], usage: TokenCounts) -> Record:
        """Return the response of a complete answer."""
        for piece in pieces:
            for _ in self._taken(piece):
                pass
        for _ in self._closed():
            pass
        return self._ended(usage)

    def _ended(self, usage: TokenCounts) -> Record:
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
            yield from self._grown("message", piece.text, [*map(logprob_record, piece.logprobs)])
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
            item = self._added("function_call")
            item.call, item.namespace, item.name = call, namespace, name
            self._calls[call.index] = item
            yield "response.output_item.added", {
                "output_index": item.index, "item": item.record()
            }  # fmt: skip
        item = self._calls[call.index]
        item.text += call.arguments
        if call.arguments:
            at = {"item_id": item.id, "output_index": item.index}
            yield "response.function_call_arguments.delta", {**at, "delta": call.arguments}

    def _begun(self, kind: str) -> Iterator[tuple[str, Record]]:
        item = self._added(kind)
        at = {"output_index": item.index}
        yield "response.output_item.added", {**at, "item": item.record()}
        yield "response.content_part.added", {
            **at, "item_id": item.id, "content_index": 0, "part": item.part
        }  # fmt: skip

    def _added(self, kind: str) -> _Item:
        item = self._open = _Item(kind, len(self._items), self._ids(_PREFIXES[kind]))
        self._items.append(item)
        return item

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
            texts = {"text": item.text, **({"logprobs": [*item.logprobs]} if item.kind == "message" else {})}
            kind = "output_text" if item.kind == "message" else "reasoning_text"
            yield f"response.{kind}.done", {**part, **texts}
            yield "response.content_part.done", {**part, "part": item.part}
        item.status = "incomplete" if self._finish in _INCOMPLETE else "completed"
        yield "response.output_item.done", {"output_index": item.index, "item": item.record()}

    def _record(self, status: str, usage: TokenCounts | None) -> Record:
        ended = status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [item.record() for item in self._items] if ended else [],
            **self._request,
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: TokenCounts) -> Record:
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._reasoned},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _event(self, kind: str, /, **fields: Any) -> Record:
        made = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return made


def _echo(body: Mapping[str, Any], stored: bool) -> Record:
    """Return the fields of a response that repeat its request."""
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": stored,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }
