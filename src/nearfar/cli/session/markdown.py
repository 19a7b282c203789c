"""Renders growing markdown: blocks that more text cannot change are printed once, the growing block is
redrawn below them.
"""

from __future__ import annotations

import time

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
"""The parser treats HTML as text, so that no part of an answer disappears."""
INTERVAL = 0.08
"""Seconds between two drawings, at least."""
SHARE = 5
"""The time between two drawings is at least this many times the time that the first one took."""


def closed(text: str) -> tuple[str, str]:
    """The blocks that more text cannot change, and the rest: the last block, which may still grow."""
    blocks = [token for token in PARSER.parse(text) if token.level == 0 and token.nesting >= 0 and token.map]
    if len(blocks) < 2 or blocks[-1].map is None:
        return "", text
    lines = text.splitlines(keepends=True)
    first = blocks[-1].map[0]
    return "".join(lines[:first]), "".join(lines[first:])


def rendered(text: str) -> Markdown:
    """Markdown for a console. Addresses of links are shown, and lines broken where the text breaks them."""
    made = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    made.parsed = PARSER.parse(text)
    for token in made.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return made


class MarkdownStream:
    """Writes a growing text to a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._open = ""
        self._any = False
        self._next = 0.0

    def push(self, text: str) -> None:
        """Append a piece of text."""
        self._open += text
        if time.monotonic() < self._next or not self._open.strip():
            return
        started = time.monotonic()
        self._draw()
        took = time.monotonic() - started
        self._next = started + max(INTERVAL, SHARE * took)

    def end(self) -> None:
        """Finish the text: the last drawing becomes permanent."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._open.strip():
            self._print(self._open)
        self._open = ""

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        done, self._open = closed(self._open)
        self._live.update(_Tail(rendered(self._open), after=self._any or bool(done)))
        if done:
            self._print(done)  # printed above the growing block, which is redrawn
        self._live.refresh()

    def _print(self, text: str) -> None:
        if self._any:
            self._console.print()
        self._console.print(rendered(text), soft_wrap=False)
        self._any = True


class _Tail:
    """The end of a renderable, as much as the terminal has lines for."""

    def __init__(self, shown: Markdown, after: bool) -> None:
        self._shown, self._after = shown, after

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options.update(height=None), pad=False)
        if self._after:
            lines.insert(0, [])
        for line in lines[-max(console.height - 1, 1) :]:
            yield from line
            yield Segment.line()
