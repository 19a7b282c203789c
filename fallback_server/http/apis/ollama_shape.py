"""Ollama's API: the shape of an answer, as one record and as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from nearfar.edge_runtime.openai.pieces import Piece, whole_calls
from nearfar.edge_runtime.openai.records import FinishReason
from nearfar.edge_runtime.tools.parts import CallPart
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.answering import check_ended
from nearfar.fallback_server.http.errors import Problem
from nearfar.fallback_server.http.paths import OLLAMA
from nearfar.fallback_server.http.shapes import Record
from nearfar.fallback_server.http.streams import line
from nearfar.fallback_server.http.times import CallTimes

NDJSON = "application/x-ndjson"
_DONE: dict[FinishReason, str] = {"length": "length"}


class OllamaShape:
    """The shape of an answer of /api/chat, or of /api/generate where `chat` is False.

    Calls are sent whole: Ollama's clients read their arguments as an object. `times`: the times
    of the call.
    """

    media_type = NDJSON

    def __init__(self, model: str, times: CallTimes, *, chat: bool) -> None:
        self._model, self._times, self._chat = model, times, chat
        self._calls: list[CallPart] = []
        self._finish: FinishReason = "stop"

    def model_is(self, model: str) -> None:
        """See ResponseWriter."""
        self._model = model

    def begin(self, usage: TokenUsage) -> Iterable[bytes]:
        """See ResponseWriter."""
        return ()

    def piece(self, piece: Piece, usage: TokenUsage) -> Iterable[bytes]:
        """See ResponseWriter."""
        self._take(piece)
        if piece.text or piece.reasoning:
            yield self._line({**self._head(), **self._said(piece.text, piece.reasoning), "done": False})

    def end(self, usage: TokenUsage) -> Sequence[bytes]:
        """See ResponseWriter."""
        calls = [{**self._head(), **self._said("", "", self._whole_calls()), "done": False}]
        lines = [self._line(record) for record in (calls if self._calls else ())]
        return [*lines, self._line({**self._head(), **self._said("", ""), **self._figures(usage)})]

    def failed(self, problem: Problem) -> Iterable[bytes]:
        """See ResponseWriter."""
        yield self._line(problem.told(OLLAMA))

    def whole(self, pieces: Sequence[Piece], usage: TokenUsage) -> Record:
        """See ResponseWriter."""
        for piece in pieces:
            self._take(piece)
        text, thought = "".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)
        return {**self._head(), **self._said(text, thought, self._whole_calls()), **self._figures(usage)}

    def _take(self, piece: Piece) -> None:
        check_ended(piece)
        self._calls += piece.tool_calls
        self._finish = piece.finish or self._finish

    def _whole_calls(self) -> list[Record]:
        made: list[Record] = []
        for call in whole_calls(self._calls):
            try:
                arguments = json.loads(call.arguments or "{}")
            except ValueError:  # num_predict cut the call
                continue
            function = {"index": call.index, "name": call.name, "arguments": arguments}
            made.append({"id": call.id, "function": function})
        return made

    def _head(self) -> Record:
        return {"model": self._model, "created_at": now()}

    def _said(self, text: str, thought: str, calls: Sequence[Record] = ()) -> Record:
        thinking = {"thinking": thought} if thought else {}
        if not self._chat:
            return {"response": text, **thinking}
        called = {"tool_calls": list(calls)} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thinking, **called}}

    def _figures(self, usage: TokenUsage) -> Record:
        return {
            "done": True,
            "done_reason": _DONE.get(self._finish, "stop"),
            "total_duration": _nanoseconds(self._times.total),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": _nanoseconds(self._times.prefill(usage.queued)),
            "eval_count": usage.completion,
            "eval_duration": _nanoseconds(self._times.decode),
        }

    @staticmethod
    def _line(record: Record) -> bytes:
        return line(record) + b"\n"


def _nanoseconds(seconds: float) -> int:
    """Convert a duration; clients divide by it, so it is not 0 for an answer of one token."""
    return max(1, round(seconds * 1e9))


def now() -> str:
    """The time as Ollama writes it."""
    return _written(datetime.now(UTC))


def never() -> str:
    """The time at which Ollama says that a model ends which stays loaded (`keep_alive` -1): in 292 years."""
    return _written(datetime.now(UTC) + timedelta(microseconds=2**63 // 1000))


def _written(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
