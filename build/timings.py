"""How long a build took, phase by phase, and how much of it earlier builds had done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from nearfar.build.targets.target import KernelCounts

PHASES = ("open", "calibrate", "weights", "kernels", "check")


@dataclass
class Timings:
    """Filled by a build: seconds of each of `PHASES` that it has come to, and the kernels of all targets.

    Weights and kernels are made side by side: their seconds overlap.
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
        """The phases that it has come to, in the order in which they begin."""
        return [(name, self.seconds[name]) for name in PHASES if name in self.seconds]

    def count(self, kernels: KernelCounts) -> None:
        """Add the kernels of a target."""
        self.kept += kernels.kept
        self.compiled += kernels.compiled
