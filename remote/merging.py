"""Merges the chunks of a streamed answer to one whole answer, with all fields that the server gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
_LAST = (
    "index",
    "type",
    "id",
    "role",
    "finish_reason",
    "stop_reason",
    "created",
    "model",
    "expires_at",
    "name",
)
"""Fields whose last value counts; other texts and lists are continued."""
_HEAD = ("choices", "usage", "error")
INDEXED = 256
"""Entries of a list that are looked through for one with the same index: calls of an answer are fewer."""


class Merger:
    """The whole answer of a stream so far. `add` takes the records of its events in order."""

    def __init__(self, model: str | None = None, whole: Mapping[str, Any] | None = None) -> None:
        """`model`: the client's name for the model, where the server has another. `whole`: the answer of a
        call that was not streamed.
        """
        self._model, self._whole = model, whole
        self._head: Json = {}
        self._choices: dict[int, Json] = {}
        self._usage: Any = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in one event's record."""
        for name, value in record.items():
            # A later chunk may repeat a field of the first one as null (prompt_token_ids).
            if name not in _HEAD and (value is not None or name not in self._head):
                self._head[name] = value
        self._usage = record.get("usage") or self._usage
        for choice in record.get("choices") or ():
            kept = self._choices.setdefault(choice.get("index") or 0, {})
            _merge(kept, choice)

    def record(self, model: str) -> Json:
        """Return the whole answer. It names the model as the server does, or by the client's name where that
        is another. `model`: the name where the server gives none.
        """
        named = self._model or (self._head if self._whole is None else self._whole).get("model") or model
        if self._whole is not None:
            return {**self._whole, "model": named}
        kind = str(self._head.get("object", "")).removesuffix(".chunk")
        choices = [_choice(self._choices[index]) for index in sorted(self._choices)]
        made: Json = {**self._head, "object": kind, "model": named, "choices": choices}
        return made if self._usage is None else {**made, "usage": self._usage}


def _choice(merged: Json) -> Json:
    """Return a merged choice in the shape of a whole answer: what were deltas is the message. OpenAI's whole
    answers have `refusal` and `logprobs` also where they are null; streams leave these out.
    """
    made: Json = _finished(merged)
    delta = made.pop("delta", None)
    if delta is None:
        return made
    calls = [
        {name: value for name, value in call.items() if name != "index"}
        for call in delta.get("tool_calls") or ()
    ]
    message: Json = {"role": "assistant", "content": None, "refusal": None, **delta}
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    if calls and not message["content"]:
        message["content"] = None
    return {"index": made.get("index", 0), "message": message, "logprobs": None, **made}


class _Text(list[str]):
    """A text in parts, which are joined once at the end."""


def _finished(value: Any) -> Any:
    if isinstance(value, _Text):
        return "".join(value)
    if isinstance(value, dict):
        return {name: _finished(each) for name, each in value.items()}
    return [_finished(each) for each in value] if isinstance(value, list) else value


def _merge(kept: Json, more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if value is None:
            kept.setdefault(name, None)
            continue
        before = kept.get(name)
        if name in _LAST or before is None:
            # A chunk repeats a call's id and name as empty texts.
            if value != "" or before is None:
                kept[name] = _begun(value, name)
        elif isinstance(before, _Text) and isinstance(value, str):
            before.append(value)
        elif isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value)
        elif type(before) is list and isinstance(value, list):
            _extend(before, value)
        else:
            kept[name] = _begun(value, name)


def _begun(value: Any, name: str = "") -> Any:
    """Return a value that can be continued."""
    if isinstance(value, str):
        return value if name in _LAST else _Text([value])
    if isinstance(value, dict):
        made: Json = {}
        _merge(made, value)
        return made
    if isinstance(value, list):
        made_list: list[Any] = []
        _extend(made_list, value)
        return made_list
    return value


def _extend(kept: list[Any], more: list[Any]) -> None:
    """Continue a list: entries with an index (calls) are merged with the entry of the same index."""
    for item in more:
        at = item.get("index") if isinstance(item, dict) else None
        same = next((one for one in kept[:INDEXED] if isinstance(one, dict) and one.get("index") == at), None)
        if at is None or same is None:
            kept.append(_begun(item) if isinstance(item, dict) else item)
        else:
            _merge(same, item)
