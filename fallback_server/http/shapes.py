"""OpenAI's response shapes: they convert pieces of answers to records for JSON. Long parts of a record are
iterators, which `written` writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from nearfar.edge_runtime.openai.pieces import Piece, RankedLogprob, whole_calls
from nearfar.edge_runtime.openai.records import TokenLogprob, TopLogprob, finite, logprob_record
from nearfar.edge_runtime.tools.parts import CallPart
from nearfar.fallback_server.engines.base import TokenUsage

Record = dict[str, Any]


@dataclass
class ResponseHead:
    """The fields that all records of a response begin with.

    `model`: the model that answers; it may be known only when the answer begins. `usage`: a stream's
    chunks have the field usage; it is null, or the tokens so far with `continuous`.
    `ids`: the response has the token ids of the prompt and of each choice.
    """

    id: str
    model: str
    usage: bool = False
    continuous: bool = False
    ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def record(
        self, kind: str, choices: Iterable[Record], streamed: bool, usage: TokenUsage | None = None
    ) -> Record:
        """Return a record with these choices."""
        made = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if not (streamed and self.usage):
            return made
        return {**made, "usage": usage_record(usage) if self.continuous and usage is not None else None}

    def token_ids(self, pieces: Seq[Piece]) -> Record:
        """Return the field with a choice's token ids, if the response has it."""
        return {"token_ids": [token for piece in pieces for token in piece.ids]} if self.ids else {}

    def prompt(self, pieces: Iterable[Piece]) -> Record:
        """Return the fields about the prompt's tokens, if the pieces begin an answer that has them."""
        told = (piece.prompt for piece in pieces if piece.prompt is not None)
        # Only the first answer of a chat has the log-probabilities of its prompt.
        found = max(told, key=lambda prompt: len(prompt.logprobs), default=None)
        if found is None:
            return {}
        ids = {"prompt_token_ids": found.ids} if self.ids and found.ids is not None else {}
        return {**ids, "prompt_logprobs": map(_by_id, found.logprobs)} if found.logprobs else ids


class ChatShape:
    """The shape of chat completions."""

    def __init__(self, head: ResponseHead, choices: int = 1) -> None:
        self._head, self.choices = head, choices

    def opening(self, index: int, usage: TokenUsage, first: Seq[Piece] = ()) -> Record | None:
        """Return the chunk with the role, in a stream's first chunk also with the prompt's token ids.

        `first`: the piece that the stream has first, if any.
        """
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunk = self._chunk(choice, replace(usage, completion=0))  # the first piece has a chunk of its own
        return {**chunk, **self._head.prompt(() if index else first)}

    def chunk(self, piece: Piece, usage: TokenUsage) -> Record | None:
        """Return the chunk with the next part of an answer."""
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
            choice["logprobs"] = content_logprobs(piece.logprobs)
        return self._chunk({**choice, **self._head.token_ids([piece])}, usage)

    def whole(self, pieces: Seq[Piece], usage: TokenUsage) -> Record:
        """Return all answers as one response."""
        made = (self._choice(index, of) for index, of in enumerate(_by_index(pieces, self.choices)))
        record = self._head.record("chat.completion", made, False)
        return {**record, **self._head.prompt(pieces), "usage": usage_record(usage)}

    def final(self, usage: TokenUsage) -> Record:
        """Return the chunk with the usage."""
        return {**self._head.record("chat.completion.chunk", [], True), "usage": usage_record(usage)}

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
            "logprobs": content_logprobs(logprobs) if logprobs else None,
            **self._head.token_ids(pieces),
        }

    def _chunk(self, choice: Record, usage: TokenUsage) -> Record:
        return self._head.record("chat.completion.chunk", [choice], True, usage)


class CompletionShape:
    """The shape of plain completions."""

    def __init__(self, head: ResponseHead, choices: int = 1) -> None:
        self._head, self.choices = head, choices

    def opening(self, index: int, usage: TokenUsage, first: Seq[Piece] = ()) -> Record | None:
        """Return None: a text has no chunk before it."""
        return None

    def chunk(self, piece: Piece, usage: TokenUsage) -> Record | None:
        """Return the chunk with the next part of a text."""
        if piece.empty:
            return None
        return self._head.record("text_completion", [self._choice(piece.index, [piece])], True, usage)

    def whole(self, pieces: Seq[Piece], usage: TokenUsage) -> Record:
        """Return all texts as one response."""
        made = (self._choice(index, of) for index, of in enumerate(_by_index(pieces, self.choices)))
        return {**self._head.record("text_completion", made, False), "usage": usage_record(usage)}

    def final(self, usage: TokenUsage) -> Record:
        """Return the chunk with the usage."""
        return {**self._head.record("text_completion", [], True), "usage": usage_record(usage)}

    def _choice(self, index: int, pieces: Seq[Piece]) -> Record:
        logprobs = [item for piece in pieces for item in piece.logprobs]
        offsets = [offset for piece in pieces for offset in piece.offsets]
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "finish_reason": pieces[-1].finish if pieces else "abort",
            "logprobs": _parallel(logprobs, offsets) if logprobs else None,
            **self._head.prompt(pieces),
            **self._head.token_ids(pieces),
        }


def _parallel(logprobs: Seq[TokenLogprob], offsets: list[int]) -> Record:
    """Return log-probabilities in the completions' older shape. An upstream need not report where tokens
    begin in the text: then `offsets` is empty.
    """
    return {
        "tokens": map(_name, logprobs),
        "token_logprobs": (finite(item.logprob) for item in logprobs),
        "top_logprobs": map(_top, logprobs),
        "text_offset": offsets,
    }


def _by_index(pieces: Seq[Piece], choices: int) -> list[list[Piece]]:
    """Group the pieces by answer."""
    found: list[list[Piece]] = [[] for _ in range(choices)]
    for piece in pieces:
        found[piece.index].append(piece)
    return found


def embeddings(model: str, vectors: Iterable[object], tokens: int) -> Record:
    """Make an embeddings response."""
    data = ({"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors))
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def usage_record(usage: TokenUsage) -> Record:
    """Return the tokens of a request in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _call_delta(call: CallPart) -> Record:
    """Return a call's record, or its continuation without id and name."""
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def merged(parts: Seq[CallPart]) -> list[Record]:
    """Merge the parts of calls into whole calls."""
    whole = map(_call_delta, whole_calls(parts))
    return [{name: value for name, value in call.items() if name != "index"} for call in whole]


def content_logprobs(logprobs: Seq[TokenLogprob]) -> Record:
    """Return the log-probabilities in the chat completions' shape."""
    return {"content": map(logprob_record, logprobs), "refusal": None}


def _by_id(entry: Mapping[int, RankedLogprob] | None) -> Record | None:
    """Return the log-probabilities at one token of a prompt, in vLLM's shape."""
    if entry is None:
        return None
    return {
        str(token): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.token}
        for token, one in entry.items()
    }


def _top(item: TokenLogprob) -> Record | None:
    """Return the token itself, then the likeliest tokens; None for the first token of a prompt, which has no
    log-probability.
    """
    if math.isnan(item.logprob):
        return None
    every: tuple[TokenLogprob | TopLogprob, ...] = (item, *item.top_logprobs)
    return {_name(one): finite(one.logprob) for one in every}


def _name(token: TokenLogprob | TopLogprob) -> str:
    """The text of a token, or its bytes where it is an incomplete character: texts are keys here and must
    differ.
    """
    if "\ufffd" in token.token and token.bytes:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.token
