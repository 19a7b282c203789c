"""Where an answer is written: to a person as a terminal shows it, to a pipe as it is."""

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
"""Control characters: a terminal would obey them, and what a model writes is to give no orders."""


def emit(text: str) -> None:
    """Write to stdout as UTF-8 whatever the locale, at once."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


class Screen:
    """Takes one answer, piece by piece; to be used with `with`. What it leaves on a terminal ends in a line
    break, which is the terminal's; what it leaves in a pipe is the text and nothing else.

    `markdown`: rendered, where the terminal can redraw. Reasoning goes to stderr, if somebody looks there.
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
        """A piece of the answer."""
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
        """A piece of the reasoning."""
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
    """What has come of an answer."""

    text: str = ""
    usage: Usage | None = None
    timings: list[RequestStats] | None = None
    cut: bool = False
    """Whether it ended because no more tokens were allowed, or fit."""

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
