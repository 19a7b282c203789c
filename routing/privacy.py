"""Privacy belongs to the text: what a private request carried stays on the device, whoever carries it
again. Nothing is sent here.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

LONG = 32
"""Characters from which a message is known again wherever it stands; shorter ones only as the beginning
they were.
"""

REMEMBERED = 20_000
"""Marks that are kept; those used longest ago are forgotten first."""

QUOTE = 12
"""Characters in a row that make an error's message a quotation."""

Messages = Iterable[Mapping[str, Any]]


class PrivateTexts:
    """Knows again what was private: by the conversation's id, by the messages it begins with, by each message
    of some length.

    Texts are kept as hashes, in memory only: a hash on disk would still answer whether a text was asked here.
    """

    def __init__(self, conversations: Iterable[str] = ()) -> None:
        self._marks: OrderedDict[bytes, None] = OrderedDict()
        self._conversations: OrderedDict[str, None] = OrderedDict((name, None) for name in conversations)

    @property
    def conversations(self) -> list[str]:
        """Ids of private conversations, to keep from start to start."""
        return list(self._conversations)

    def carries(self, messages: Messages, conversation: str | None) -> bool:
        """Whether a request has something of a private one."""
        found = conversation is not None and conversation in self._conversations
        begun, long = _marks(messages)
        for mark in (*begun, *long):
            if mark in self._marks:
                self._marks.move_to_end(mark)
                found = True
        return found

    def remember(self, messages: Messages, conversation: str | None) -> None:
        """A private request, or a private answer as a message."""
        if conversation is not None:
            _keep(self._conversations, conversation)
        begun, long = _marks(messages)
        for mark in (*begun[-1:], *long):
            _keep(self._marks, mark)


def without_quotes(said: str, messages: Messages) -> str:
    """An error's message as it may be shown and logged: not if it has something of the prompt in it."""
    said = said[:2000]
    for message in messages:
        text = _text(message)
        parts = (
            {text[:QUOTE]}
            if 4 <= len(text) <= QUOTE
            else {said[at : at + QUOTE] for at in range(len(said) - QUOTE + 1)}
        )
        if any(part in said and part in text for part in parts):
            return "the message is left out, for it quotes the prompt"
    return said


def _keep(kept: OrderedDict[Any, None], item: Any) -> None:
    kept[item] = None
    kept.move_to_end(item)
    while len(kept) > REMEMBERED:
        kept.popitem(last=False)


def _marks(messages: Messages) -> tuple[list[bytes], list[bytes]]:
    """Hashes of each beginning, and of each long message. What an application says to all (system) is
    nobody's secret.
    """
    begun, long = [], []
    chain = blake2b(digest_size=16)
    for message in messages:
        if message.get("role") in ("system", "developer"):
            continue
        text = " ".join(_text(message).split())
        if len(text) >= LONG:
            long.append(blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest())
        chain.update(f"{message.get('role')}\0{text}\0".encode(errors="surrogatepass"))
        begun.append(chain.digest())
    return begun, long


def _text(message: Mapping[str, Any]) -> str:
    """All that a message says: text, other parts and calls as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = content if isinstance(content, list) else [content or ""]
    return "".join(map(_said, parts)) + (json.dumps(calls, default=str) if calls else "")


def _said(part: Any) -> str:
    if isinstance(part, str):
        return part
    return str(part["text"]) if _is_text(part) else json.dumps(part, default=str)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and "text" in part
