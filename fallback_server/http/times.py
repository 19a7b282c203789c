"""The times of a call: its beginning, its submission to the engine, and its first and last token."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class CallTimes:
    """Times in seconds of the monotonic clock; 0 stands for an event that has not happened."""

    started: float = field(default_factory=time.monotonic)
    submitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def total(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.started

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last one."""
        return self.last - self.first

    def prefill(self, queued: float | None) -> float:
        """Return the seconds of the prefill. `queued`: the seconds in the engine's queue before it; None
        where the engine does not know them: then they are part of the prefill. An answer without tokens was
        prefilled until now.
        """
        return max(0.0, (self.first or time.monotonic()) - self.submitted - (queued or 0.0))
