"""Progress of waits: while a model is loaded, kernels are compiled, or a prompt is read."""

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
"""The kernels that are compiled when a load returns: see LoadOptions.ready."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The phase of a wait, and how far it is.

    A load reports "checking" (`done` of `total` bytes), "loading", "trying" (timing several programs on a
    GPU, at the first load), "kernels", "warming" (plans that have run once) and, at the end, "ready"; each
    only if there is something to wait for. Later come "kernels", if an answer waits for some after all, and
    "prompt": tokens read of the prompts of all requests that wait for their first token, including cached
    tokens. The last event of either has `done` equal to `total`. "downloading" (bytes) and "starting" come
    from servers (`nearfar serve`).
    """

    phase: Phase
    done: int = 0
    total: int = 0
    """The total in the phase's unit; 0 if unknown."""

    @property
    def over(self) -> bool:
        """Whether the wait is over. A phase of a load is followed by the next one, and at last by "ready"."""
        counted = self.phase in ("kernels", "prompt") and self.total > 0
        return self.phase == "ready" or (counted and self.done >= self.total)

    def __str__(self) -> str:
        """The progress as a line for a terminal or a log."""
        words = WORDS[self.phase]
        if not self.total:
            return words
        if self.phase in ("checking", "downloading"):
            return f"{words}, {self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
        return f"{words}, {self.done:,} of {self.total:,}" + (" tokens" if self.phase == "prompt" else "")


Tell = Callable[[Progress], None]
"""A callback for progress: called from any thread, one call at a time; it must return at once."""


class Teller:
    """Calls a Tell. After an exception it is not called again: a broken display is not a reason to fail a
    request.
    """

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self._lock = threading.Lock()

    def __call__(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        """Report progress if there is a callback."""
        with self._lock:
            if self._tell is None:
                return
            try:
                self._tell(Progress(phase, done, total))
            except Exception:
                log.exception("the callback for progress failed, and is not called again")
                self._tell = None
