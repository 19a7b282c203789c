"""Keeps responses in memory, so that later requests can read and continue them (`store`,
`previous_response_id`, items by reference).

They are bounded by count and by bytes. What exceeds the bounds is removed from the owner with the most
bytes, its oldest first, so that one client cannot push out others' responses.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearfar.edge_runtime.openai.responses.asking import Record, messages_of
from nearfar.edge_runtime.openai.responses.shape import new_id
from nearfar.errors import RequestError


@dataclass(frozen=True)
class KeptResponse:
    """A response, the items that it answered, and the conversation so far as messages of a chat."""

    record: Record
    items: list[Record]
    messages: list[Record]
    bytes: int = 0

    @property
    def parts(self) -> list[Record]:
        """All items that a later request may refer to."""
        output: list[Record] = self.record.get("output", [])
        return [*self.items, *output]


@dataclass
class _Owned:
    """What one owner keeps: responses, and the items of all of them, by id."""

    responses: OrderedDict[str, KeptResponse] = field(default_factory=OrderedDict)
    items: dict[str, Record] = field(default_factory=dict)
    bytes: int = 0


class KeptResponses:
    """The responses of all owners; each finds only its own."""

    def __init__(self, most: int = 1024, most_bytes: int = 64 << 20) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._of: dict[str, _Owned] = {}
        self._count = self._bytes = 0

    def keep(self, owner: str, record: Record, body: Mapping[str, Any], before: Sequence[Record]) -> None:
        """Keep a response to a request. `before`: the messages of the responses that it continues."""
        given = body.get("input")
        said = [*messages_of(given), *messages_of([_bare(item) for item in record["output"]])]
        self.put(owner, record, _items(given), [*before, *said])

    def put(self, owner: str, record: Record, items: list[Record], messages: list[Record]) -> None:
        """Keep a response, unless it alone exceeds the limit of bytes."""
        size = len(json.dumps([record, items, messages]))
        if size > self._most_bytes:
            return
        mine = self._of.setdefault(owner, _Owned())
        made = KeptResponse(record, items, messages, size)
        mine.responses[record["id"]] = made
        mine.items |= {item["id"]: item for item in made.parts}
        mine.bytes += size
        self._count += 1
        self._bytes += size
        while self._count > self._most or self._bytes > self._most_bytes:
            largest = max(self._of, key=lambda name: self._of[name].bytes)
            self.remove(largest, next(iter(self._of[largest].responses)))

    def find(self, owner: str, name: str, param: str | None = None) -> KeptResponse:
        """Return the response of this id. Raises RequestError about `param` where there is none."""
        mine = self._of.get(owner)
        if mine is not None and name in mine.responses:
            return mine.responses[name]
        raise self._missing("response", name, param)

    def messages(self, owner: str, name: str | None) -> list[Record]:
        """Return the conversation of `previous_response_id`; none without an id."""
        return [] if name is None else self.find(owner, name, "previous_response_id").messages

    def resolved(self, owner: str, given: str | Sequence[Record] | None) -> str | Sequence[Record] | None:
        """Return the input of a request with each reference replaced by the item that it names. Raises
        RequestError for an unknown item.
        """
        if given is None or isinstance(given, str):
            return given
        return [
            self._item(owner, each, f"input.{at}.id: ") if is_reference(each) else each
            for at, each in enumerate(given)
        ]

    def remove(self, owner: str, name: str) -> None:
        """Remove a response. Raises RequestError where there is none."""
        gone = self.find(owner, name)
        mine = self._of[owner]
        del mine.responses[name]
        for item in gone.parts:
            if mine.items.get(item["id"]) is item:  # a later response may have the same item
                del mine.items[item["id"]]
        mine.bytes -= gone.bytes
        self._count -= 1
        self._bytes -= gone.bytes
        if not mine.responses:
            del self._of[owner]

    def _item(self, owner: str, reference: Mapping[str, Any], place: str) -> Record:
        mine, name = self._of.get(owner), reference["id"]
        if mine is None or name not in mine.items:
            raise self._missing("item", name, "input", place)
        return _bare(mine.items[name])

    def _missing(self, what: str, name: str, param: str | None, place: str = "") -> RequestError:
        """Return the error about an unknown id. `param`: the field of a request that continues a
        conversation, which could send the conversation instead; None for a request that reads or deletes.
        """
        instead = "" if param is None else "; send the whole conversation as input"
        return RequestError(
            f"{place}there is no {what} {name!r:.100} here: the newest {self._most:,} responses are kept in "
            f"memory until this program ends, unless store was false{instead}",
            param,
        )


def is_reference(item: Mapping[str, Any]) -> bool:
    """Whether an item only names another one by its id. OpenAI's clients may leave out the type of such an
    item.
    """
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and {*item} - {"type"} == {"id"})


def _items(given: str | Sequence[Record] | None) -> list[Record]:
    """Return the items of a request as they are listed: each with an id, and messages with parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [{"id": new_id("item"), **_listed(item)} for item in given or ()]


def _listed(item: Record) -> Record:
    """Return an item with its type and, for a message, its text as a part: OpenAI's clients read both."""
    if item.get("type", "message") != "message":
        return item
    text = item["content"]
    if not isinstance(text, str):
        return {**item, "type": "message"}
    part: Record = {"type": "input_text", "text": text}
    if item["role"] == "assistant":
        part = {"type": "output_text", "text": text, "annotations": []}
    return {**item, "type": "message", "content": [part]}


def _bare(item: Mapping[str, Any]) -> Record:
    """Return an item in the form of a request: without id, status, annotations and log-probabilities."""
    left = {name: value for name, value in item.items() if name not in ("id", "status")}
    if isinstance(left.get("content"), list):
        left["content"] = [
            {name: value for name, value in part.items() if name not in ("annotations", "logprobs")}
            for part in left["content"]
        ]
    return left
