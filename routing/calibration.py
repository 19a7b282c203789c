"""A difficulty threshold that follows a target share of cloud calls, and limits chosen from a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nearfar.routing.policy import CalibrationOptions


class Threshold:
    """An online estimate of the (1 − `share`) quantile of the difficulties seen.

    Stochastic approximation after Robbins and Monro (1951): each prompt above moves the threshold up by
    step·(1 − share), each below moves it down by step·share; it rests where the share is met. The step
    shrinks with 1/√n to a floor, so that it follows when prompts change.
    """

    def __init__(
        self, share: float, start: float, options: CalibrationOptions | None = None, seen: int = 0
    ) -> None:
        self._share = share
        self._options = options or CalibrationOptions()
        self.value = start
        self.seen = seen

    def observe(self, difficulty: float) -> float:
        """Learn from the difficulty of a prompt. Returns the new threshold, in [0, 1]."""
        self.seen += 1
        step = max(self._options.floor, self._options.rate / math.sqrt(self.seen))
        moved = self.value + step * ((1.0 if difficulty >= self.value else 0.0) - self._share)
        self.value = min(max(moved, 0.0), 1.0)
        return self.value

    def as_json(self) -> dict[str, Any]:
        """Return the state to keep between starts."""
        return {"share": self._share, "threshold": self.value, "seen": self.seen}

    @classmethod
    def restored(
        cls, data: Mapping[str, Any], share: float, start: float, options: CalibrationOptions | None = None
    ) -> Threshold:
        """Restore from a kept state. Another share counts its steps again, from the threshold that was
        reached.
        """
        value = float(data.get("threshold", start))
        seen = int(data.get("seen", 0)) if data.get("share") == share else 0
        return cls(share, min(max(value, 0.0), 1.0), options, seen)


def limit_for(values: Seq[float], share: float) -> float:
    """Return the value at rank `share` of the sorted values: that fraction of them, rounded down, is below
    it.

    `values`: for each answer of a sample, the lowest mean logprob that its monitor saw. At least one is
    needed.
    """
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
