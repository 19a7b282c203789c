"""How far a wait is, for who waits: while a model is loaded, kernels are compiled, a prompt is read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "downloading", "starting", "checking", "loading", "trying", "kernels", "warming", "prompt", "ready"
]

WORDS: dict[Phase, str] = {
    "downloading": "downloading the checkpoint",
    "starting": "starting the engine",
    "checking": "checking the files",
    "loading": "loading the weights",
    "trying": "finding out which program is the quickest here",
    "kernels": "compiling kernels",
    "warming": "running each kernel for the first time",
    "prompt": "reading the prompt",
    "ready": "ready",
}

Ready = Literal["all", "decode", "no"]
"""What is compiled when a load is done: see LoadOptions.ready."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """What is waited for, and how far it is.

    A load tells "checking" (`done` of `total` bytes), "loading", "trying" (of several programs for a GPU, at
    the first load), "kernels", "warming" (plans that have run once) and, at the end, "ready"; each where
    there is something to wait for. After that come "kernels", where an answer waits for some after all, and
    "prompt": tokens read of those of all requests that wait for their first token, from the cache included.
    The last event of either has `done` equal to `total`. "downloading" (bytes) and "starting" are of
    servers (`nearfar serve`).
    """

    phase: Phase
    done: int = 0
    total: int = 0
    """In what the phase counts; 0 where nobody knows."""

    @property
    def over(self) -> bool:
        """Whether nobody waits any more. What a load is at goes over into its next phase, and "ready"."""
        counted = self.phase in ("kernels", "prompt") and self.total > 0
        return self.phase == "ready" or (counted and self.done >= self.total)

    def __str__(self) -> str:
        """As a line of a terminal or a log."""
        words = WORDS[self.phase]
        if not self.total:
            return words
        if self.phase in ("checking", "downloading"):
            return f"{words}, {self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
        return f"{words}, {self.done:,} of {self.total:,}" + (" tokens" if self.phase == "prompt" else "")


Tell = Callable[[Progress], None]
"""Is told of progress, from any thread, one call at a time; it is to return at once."""


class Teller:
    """Calls a Tell. One that raises is not called again: what it shows is no reason to fail a request."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self._lock = threading.Lock()

    def __call__(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        """Tell, where somebody listens."""
        with self._lock:
            if self._tell is None:
                return
            try:
                self._tell(Progress(phase, done, total))
            except Exception:
                log.exception("the callback for progress failed, and is not called again")
                self._tell = None
