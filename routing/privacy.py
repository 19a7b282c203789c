"""Privacy belongs to the text: the texts of a private request stay on the device, also in later requests that
carry or quote them. Nothing is sent from here.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from nearfar.routing.marks_file import MARK_BYTES, MarkAddition, MarksFile
from nearfar.routing.quotes import letters, windows

LONG = 32
"""Characters from which a whole message is recognized anywhere; a shorter one only as the same beginning of a
conversation.
"""

REMEMBERED, WINDOWS = 20_000, 100_000
"""Most texts, conversations and windows that are kept; the least recently used are forgotten first."""

QUOTE = 12
"""Characters in a row that make an error message a quotation."""

UNSAID = ("role", "type", "id", "tool_call_id")
"""Fields of messages and parts that carry no text of the user."""

FILES = ("image_url", "input_audio", "video_url", "file")
"""Types of parts that are files."""

Message = Mapping[str, Any]
Messages = Iterable[Message]


@dataclass(frozen=True)
class Marks:
    """Hashes of a request's texts under the client's key: of each beginning of the conversation, of each long
    message, and of the windows of all texts and files; `own` has the windows of the user's own texts.
    """

    begun: tuple[bytes, ...]
    whole: tuple[bytes, ...]
    windows: frozenset[bytes]
    own: frozenset[bytes]


class PrivateTexts:
    """Recognizes private texts: by the conversation's id, by the messages it begins with, by each long
    message, and by quotations anywhere.

    `path`: the file that keeps the marks between starts. `conversations`: ids from the state's old form.
    """

    def __init__(self, path: Path | None = None, conversations: Iterable[str] = ()) -> None:
        self._texts: OrderedDict[bytes, None] = OrderedDict()
        self._windows: OrderedDict[bytes, None] = OrderedDict()
        self._conversations: OrderedDict[str, None] = OrderedDict()
        self._file = MarksFile(path)
        for known in self._file.load():
            self._take(known)
        if self._file.worn:
            self._file.renew(
                MarkAddition(tuple(self._conversations), tuple(self._texts), tuple(self._windows))
            )
        if new := tuple(name for name in map(str, conversations) if name not in self._conversations):
            self._keep(MarkAddition(new))

    def marks(self, messages: Messages, params: Mapping[str, Any] | None = None) -> Marks:
        """Compute the marks of a request. This takes a while for a long request, and may be called in a
        thread.

        Texts that an application sends to all (the system prompt, tools, other parameters) are not secret, so
        their windows are not the user's own; but they may quote a private text.
        """
        begun, whole, quoted, own = [], [], set[bytes](), set[bytes]()
        chain = blake2b(key=self._file.key, digest_size=16)
        for message in messages:
            found = self._marks_within(message)
            quoted |= found
            if message.get("role") in ("system", "developer"):
                continue
            own |= found
            text = " ".join(_text(message).split())
            if len(text) >= LONG:
                whole.append(self._mark(text))
            chain.update(_bytes(f"{message.get('role')}\0{text}\0"))
            begun.append(chain.digest()[:MARK_BYTES])
        quoted |= self._marks_within(params or {})
        return Marks(tuple(begun), tuple(whole), frozenset(quoted), frozenset(own))

    def known(self, marks: Marks, conversation: str | None) -> Literal["earlier", "quote"] | None:
        """Whether a request carries an earlier private text again ("earlier") or quotes one ("quote")."""
        texts = _used(self._texts, (*marks.begun, *marks.whole))
        quoted = _used(self._windows, marks.windows)
        if texts or (conversation is not None and conversation in self._conversations):
            return "earlier"
        return "quote" if quoted else None

    def remember(self, marks: Marks, conversation: str | None) -> None:
        """Remember a private request, or a private answer as a message. It is in the file when this
        returns.
        """
        self._keep(
            MarkAddition(
                (conversation,) if conversation is not None else (),
                (*marks.begun[-1:], *marks.whole),
                tuple(sorted(marks.own)),
            )
        )

    def remember_conversation(self, conversation: str | None) -> None:
        """Remember the conversation of a request that quotes a private text. Its other texts are not
        remembered, since they may be an application's own.
        """
        self._keep(MarkAddition((conversation,) if conversation is not None else ()))

    def _keep(self, known: MarkAddition) -> None:
        new = MarkAddition(
            tuple(name for name in known.conversations if name not in self._conversations),
            tuple(mark for mark in known.texts if mark not in self._texts),
            tuple(mark for mark in known.windows if mark not in self._windows),
        )
        self._take(known)
        if new:
            self._file.add(new)

    def _take(self, known: MarkAddition) -> None:
        _add(self._conversations, known.conversations, REMEMBERED)
        _add(self._texts, known.texts, REMEMBERED)
        _add(self._windows, known.windows, WINDOWS)

    def _marks_within(self, value: Any) -> set[bytes]:
        """The marks of all windows of a value's texts together, and of each of its files."""
        said = [*_strings(value)]
        found = windows(letters("\n".join(text for text, is_file in said if not is_file)))
        files = {_bytes(text) for text, is_file in said if is_file and len(text) >= LONG}
        return {blake2b(data, key=self._file.key, digest_size=MARK_BYTES).digest() for data in found | files}

    def _mark(self, text: str) -> bytes:
        return blake2b(_bytes(text), key=self._file.key, digest_size=MARK_BYTES).digest()


def without_quotes(said: str, messages: Messages) -> str:
    """Return an error message for display and logs; a message that quotes the prompt is replaced."""
    said = said[:2000]
    for message in messages:
        text = _text(message)
        parts = (
            {text[:QUOTE]}
            if 4 <= len(text) <= QUOTE
            else {said[at : at + QUOTE] for at in range(len(said) - QUOTE + 1)}
        )
        if any(part in said and part in text for part in parts):
            return "the message is omitted, because it quotes the prompt"
    return said


def _used(kept: OrderedDict[bytes, None], marks: Iterable[bytes]) -> bool:
    """Whether any of the marks is kept; kept ones become the most recently used."""
    found = [mark for mark in marks if mark in kept]
    for mark in found:
        kept.move_to_end(mark)
    return bool(found)


def _add(kept: OrderedDict[Any, None], items: Iterable[Any], most: int) -> None:
    for item in items:
        kept[item] = None
        kept.move_to_end(item)
    while len(kept) > most:
        kept.popitem(last=False)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _strings(value: Any, is_file: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield every text in messages and parameters, at any depth (content, parts, reasoning, calls and results
    of tools), and whether it is a picture, a sound or another file, which is recognized only as a whole.
    """
    if isinstance(value, str):
        yield value, is_file
    elif isinstance(value, Mapping):
        kind = value.get("type")
        for name, item in value.items():
            if name not in UNSAID:
                yield from _strings(item, is_file or (name == kind and name in FILES))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, is_file)


def _text(message: Message) -> str:
    """Return the whole content of a message: text, and other parts and calls as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = content if isinstance(content, list) else [content or ""]
    return "".join(map(_said, parts)) + (json.dumps(calls, default=str) if calls else "")


def _said(part: Any) -> str:
    if isinstance(part, str):
        return part
    return str(part["text"]) if _is_text(part) else json.dumps(part, default=str)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and "text" in part
