"""Writes an answer: rendered on a terminal, unchanged into a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console

from nearfar.cli.drawing import draws, is_terminal
from nearfar.cli.session.markdown import MarkdownStream
from nearfar.edge_runtime.engine.requests import RequestStats
from nearfar.edge_runtime.openai.records import ChatCompletionChunk, Usage

UNSHOWN = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters, which are removed on a terminal: it would obey them, and a model is to give it no
commands.
"""


def emit(text: str) -> None:
    """Write to stdout as UTF-8, whatever the locale, without buffering."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


class Screen:
    """Writes one answer, piece by piece; a context manager. On a terminal a line break is added at the end; a
    pipe gets exactly the text.

    `markdown`: render it where the terminal can redraw. Reasoning goes to stderr if that is a terminal.
    """

    def __init__(self, markdown: bool = False) -> None:
        self._terminal = is_terminal()
        self._stream = MarkdownStream(Console(highlight=False)) if markdown and draws() else None
        self._aside = Console(stderr=True, highlight=False, soft_wrap=True)
        self._last = self._thought = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_thought()
        if self._stream is not None:
            self._stream.end()
        elif self._terminal and self._last and not self._last.endswith("\n"):
            emit("\n")

    def write(self, text: str) -> None:
        """Write a piece of the answer."""
        if not text:
            return
        self._close_thought()
        shown = text.translate(UNSHOWN) if self._terminal else text
        if self._stream is not None:
            self._stream.push(shown)
        else:
            emit(shown)
        self._last = shown or self._last

    def think(self, text: str) -> None:
        """Write a piece of the reasoning."""
        if not text or not self._aside.is_terminal:
            return
        if self._stream is not None and not self._thought:
            self._stream.end()
        self._thought = text.translate(UNSHOWN) or self._thought
        self._aside.print(self._thought, style="dim", markup=False, end="")

    def _close_thought(self) -> None:
        if self._thought:
            self._aside.print("" if self._thought.endswith("\n") else "\n")
            self._thought = ""


@dataclass
class Answered:
    """The parts of an answer that have arrived."""

    text: str = ""
    usage: Usage | None = None
    timings: list[RequestStats] | None = None
    cut: bool = False
    """Whether the answer ended at max_tokens, or at the end of the context."""

    def show(self, chunks: Iterable[ChatCompletionChunk], screen: Screen) -> None:
        """Write the chunks to a screen as they come."""
        for chunk in chunks:
            for choice in chunk.choices:
                screen.think(choice.delta.reasoning_content or "")
                screen.write(choice.delta.content or "")
                self.text += choice.delta.content or ""
                self.cut = self.cut or choice.finish_reason == "length"
            self.usage = chunk.usage or self.usage
            self.timings = chunk.timings or self.timings
