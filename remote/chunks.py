"""Reads the chunks of a streamed answer from untrusted JSON. Data without OpenAI's shape raises
ShapeError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import FinishReason, TokenLogprob, TopLogprob
from nearfar.edge_runtime.tools.parts import CallPart
from nearfar.remote.merging import Merger

FINISHES: tuple[FinishReason, ...] = get_args(FinishReason)
MAX_TOKENS = 2**31 - 1
"""The largest count or index that is accepted."""


class ShapeError(ValueError):
    """JSON without the expected shape."""


@dataclass(frozen=True)
class UsageCounts:
    """Tokens as the server counts them: of the prompt, of all answers so far, and the prompt tokens found in
    its cache.
    """

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True)
class StreamChunk:
    """Events of a stream that came together. `data`: the events as they are passed on, if they are."""

    parts: tuple[Piece, ...] = ()
    usage: UsageCounts | None = None
    data: bytes = b""
    id: str = ""
    """The server's id of the answer, with its first events."""
    merger: Merger | None = None
    """The whole answer so far, if that was asked for."""


@dataclass(frozen=True)
class Passed(Piece):
    """A part of an answer with the server's events that carry it. `data` is sent instead of the piece itself;
    it is empty where an earlier piece had the events.
    """

    data: bytes = b""
    usage_told: bool = False
    """Whether the usage of the whole call is among the events."""
    id: str = ""
    """The server's id of the answer, with its first events; clients know the answer by it."""
    merger: Merger | None = None
    """The whole answer so far, where it is sent whole."""


def read_chunk(record: Mapping[str, Any], *, chat: bool) -> StreamChunk:
    """Read a chunk of a chat completion, or of a completion."""
    parts = tuple(
        read_part(_map(choice, "choice"), chat=chat) for choice in _list(record.get("choices"), "choices")
    )
    return StreamChunk(tuple(part for part in parts if not part.empty), read_usage(record.get("usage")))


def read_whole(record: Mapping[str, Any], *, chat: bool) -> StreamChunk:
    """Read an answer that was not streamed, as one chunk whose deltas are the messages."""
    choices = [_map(choice, "choice") for choice in _list(record.get("choices"), "choices")]
    made = [{**choice, "delta": choice.get("message")} for choice in choices]
    return read_chunk({**record, "choices": made}, chat=chat)


def read_part(choice: Mapping[str, Any], *, chat: bool) -> Piece:
    """Read one choice of a chunk."""
    index, finish = (
        _count(choice.get("index"), "index"),
        _finish(_text(choice.get("finish_reason"), "finish_reason")),
    )
    given = choice.get("token_ids")  # on request
    ids = tuple(_count(token, "token_ids") for token in _list(given, "token_ids")) if given else ()
    if not chat:
        text = _text(choice.get("text"), "text")
        parallel = _map(choice.get("logprobs"), "logprobs")
        logprobs = _parallel(parallel)
        offsets = tuple(_count(at, "text_offset") for at in _list(parallel.get("text_offset"), "text_offset"))
        tokens = len(ids) or int(bool(text))
        return Piece(index, text, logprobs=logprobs, finish=finish, tokens=tokens, offsets=offsets, ids=ids)
    delta = _map(choice.get("delta"), "delta")
    text = _text(delta.get("content"), "content")
    reasoning = _text(delta.get("reasoning_content") or delta.get("reasoning"), "reasoning_content")
    calls = tuple(_call(_map(item, "tool_call")) for item in _list(delta.get("tool_calls"), "tool_calls"))
    told = _list(_map(choice.get("logprobs"), "logprobs").get("content"), "logprobs.content")
    logprobs = tuple(_logprob(_map(item, "logprob")) for item in told)
    tokens = len(ids) or len(logprobs) or int(bool(text or reasoning or calls))
    return Piece(index, text, reasoning, calls, logprobs, finish, tokens, ids=ids)


def _finish(reason: str) -> FinishReason | None:
    """Convert a finish reason. Another server's own reason ("eos", "end_turn") counts as "stop"."""
    return next((known for known in FINISHES if known == reason), "stop") if reason else None


def read_usage(value: object) -> UsageCounts | None:
    """Read a usage record; None where there is none."""
    if value is None:
        return None
    usage = _map(value, "usage")
    details = _map(usage.get("prompt_tokens_details"), "prompt_tokens_details")
    prompt, completion = (_count(usage.get(name), name) for name in ("prompt_tokens", "completion_tokens"))
    return UsageCounts(prompt, completion, min(_count(details.get("cached_tokens"), "cached_tokens"), prompt))


def _call(item: Mapping[str, Any]) -> CallPart:
    function = _map(item.get("function"), "function")
    return CallPart(
        _count(item.get("index"), "index"), _text(item.get("id"), "id"), _text(function.get("name"), "name"),
        _text(function.get("arguments"), "arguments"),
    )  # fmt: skip


def _logprob(item: Mapping[str, Any]) -> TokenLogprob:
    others = (_map(other, "top_logprob") for other in _list(item.get("top_logprobs"), "top_logprobs"))
    top = [
        TopLogprob(_text(o.get("token"), "token"), _number(o.get("logprob")), _bytes(o.get("bytes")))
        for o in others
    ]
    return TokenLogprob(
        _text(item.get("token"), "token"), _number(item.get("logprob")), _bytes(item.get("bytes")), top
    )


def _parallel(logprobs: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """Read log-probabilities in the completions' older shape of parallel lists. A missing log-probability (a
    prompt's first token) becomes NaN.
    """
    tokens, values = (_list(logprobs.get(name), name) for name in ("tokens", "token_logprobs"))
    tops = _list(logprobs.get("top_logprobs"), "top_logprobs") or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops):
        raise ShapeError(
            f"logprobs of {len(tokens)} tokens, {len(values)} values and {len(tops)} alternatives"
        )
    out = []
    for token, value, top in zip(tokens, values, tops, strict=True):
        text = _text(token, "token")
        pairs = [
            (_text(name, "token"), _number(number)) for name, number in _map(top, "top_logprobs").items()
        ]
        alternatives = [TopLogprob(name, number, list(name.encode())) for name, number in pairs]
        out.append(
            TokenLogprob(
                text, math.nan if value is None else _number(value), list(text.encode()), alternatives
            )
        )
    return tuple(out)


def _map(value: object, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ShapeError(f"{name} is not an object: {value!r:.80}")
    return value


def _list(value: object, name: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ShapeError(f"{name} is not a list: {value!r:.80}")
    return value


def _text(value: object, name: str) -> str:
    """Read a text and make it encodable: surrogate pairs are joined, and lone surrogates replaced."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ShapeError(f"{name} is not a text: {value!r:.80}")
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(value: object, name: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise ShapeError(f"{name} is not a count: {value!r:.80}")
    return value


def _number(value: object) -> float:
    """Read a log-probability. Values that are not finite become -9999."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, int) and abs(value) > MAX_TOKENS)
    ):
        raise ShapeError(f"logprob is not a number: {value!r:.80}")
    return float(value) if math.isfinite(value) else -9999.0


def _bytes(value: object) -> list[int]:
    found = _list(value, "bytes")
    if not all(type(item) is int and 0 <= item < 256 for item in found):
        raise ShapeError(f"bytes are none: {value!r:.80}")
    return found
