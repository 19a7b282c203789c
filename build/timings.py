"""Measures how long each phase of a build takes, and counts the kernels that earlier builds had compiled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from nearfar.build.targets.target import KernelCounts

PHASES = ("open", "calibrate", "weights", "kernels", "check")


@dataclass
class Timings:
    """Seconds of each of `PHASES` that a build has begun, and the kernels of all targets.

    Weights and kernels are made at the same time, so their seconds overlap.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    kept: int = 0
    compiled: int = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to a phase."""
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def listed(self) -> list[tuple[str, float]]:
        """The phases begun so far with their seconds, in the order in which they begin."""
        return [(name, self.seconds[name]) for name in PHASES if name in self.seconds]

    def count(self, kernels: KernelCounts) -> None:
        """Add the kernels of a target."""
        self.kept += kernels.kept
        self.compiled += kernels.compiled
