"""The line editor of a terminal: several lines, pastes as one text, history from session to session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

from nearfar.cli.session.commands import COMMANDS, FILES
from nearfar.cli.session.input import fence_open
from nearfar.cli.session.settings import SETTINGS
from nearfar.folders import write_whole

STYLE = Style.from_dict(
    {"prompt": "bold", "continuation": "ansibrightblack", "placeholder": "ansibrightblack"}
)
MOST_HISTORY = 1 << 20
"""Bytes of the history file beyond which its older half is dropped."""


class Editor:
    """Reads questions from a terminal. Enter sends; Alt-Enter, a backslash before Enter, an open fence and a
    paste continue the question in a new line. `history`: the file for typed input; None: it is kept for this
    session only.
    """

    def __init__(self, history: Path | None) -> None:
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("class:prompt", "› ")]),
            multiline=True,
            prompt_continuation=FormattedText([("class:continuation", "… ")]),
            placeholder=_placeholder,
            key_bindings=_keys(),
            history=_history(history),
            completer=_Words(),
            complete_while_typing=False,
            enable_open_in_editor=True,
            style=STYLE,
        )

    def read(self) -> str | None:
        """The next question."""
        try:
            return self._session.prompt()
        except EOFError:
            return None


def _placeholder() -> FormattedText:
    """The hint in an empty line; none while the history is searched, where a match is shown."""
    return FormattedText([] if is_searching() else [("class:placeholder", "a question, or /help")])


def _keys() -> KeyBindings:
    """Key bindings of the line; in a search of the history keys keep their usual meaning (Enter takes the
    match).
    """
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and not buffer.document.text_after_cursor:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif fence_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(file: Path | None) -> History:
    """The history in a file that only its owner can read, or in memory where the file cannot be written."""
    if file is None:
        return InMemoryHistory()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        _shorten(file)
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)


def _shorten(file: Path) -> None:
    """Drop the older half of a history that has grown too long. An entry begins after an empty line."""
    if file.stat().st_size <= MOST_HISTORY:
        return
    data = file.read_bytes()
    cut = data.find(b"\n\n", len(data) // 2)
    with contextlib.suppress(OSError):
        write_whole(file, data[cut + 1 :] if cut >= 0 else b"")


class _Words(Completer):
    """Completes commands and their arguments: files, names of settings."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """Yield completions of the word before the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, blank, rest = text[1:].partition(" ")
        if not blank:
            yield from _beginning(name, COMMANDS)
        elif name in FILES:
            yield from self._paths.get_completions(Document(rest), event)
        elif name == "set" and " " not in rest:
            yield from _beginning(rest, SETTINGS)


def _beginning(word: str, among: Iterable[str]) -> Iterable[Completion]:
    return (Completion(name, -len(word)) for name in among if name.startswith(word))
