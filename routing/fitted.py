"""A router that was fitted to outcomes: a small JSON model of what the device's model shows about a prompt.

It says how likely the cloud is to answer better than this device's model, and from which probability on a
prompt goes there. `nearfar route fit` makes the file (fitting.py); this file needs nothing but Python.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nearfar.errors import RequestError

VERSION = 1
FEATURES = ("length", "entropy", "best", "margin", "prompt_logprob", "sure")
"""What a router may look at: fields of Knowledge, and `length`, the logarithm of the prompt's tokens."""


@dataclass(frozen=True)
class Point:
    """A point of the curve, from examples that were kept back: the quality, in the outcomes' unit, when
    `share` of the prompts go to the cloud, which are those from `threshold` on.
    """

    share: float
    threshold: float
    quality: float


@dataclass(frozen=True)
class FittedRouter:
    """Logistic regression: bias + Σ weights · (features − mean) / scale. A missing feature counts as its
    mean.

    `artifact`: the digest of the artifact whose model the features are of. `threshold`: the probability from
    which on a prompt goes to the cloud. `auroc`, `curve`: from examples that were kept back in turns.
    """

    model: str
    artifact: str
    features: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    threshold: float
    examples: int
    auroc: float
    curve: tuple[Point, ...]

    def gain(self, knowledge: Mapping[str, Any]) -> float:
        """The probability that the cloud answers better, from a Knowledge as a dictionary."""
        total = self.bias
        for name, mean, scale, weight in zip(self.features, self.mean, self.scale, self.weights, strict=True):
            value = feature(knowledge, name)
            total += 0.0 if value is None else weight * (value - mean) / scale
        return 1 / (1 + math.exp(-min(max(total, -500.0), 500.0)))

    def check(self, artifact: str, path: str) -> None:
        """Raise RequestError if the router was fitted to another artifact."""
        if artifact != self.artifact:
            raise RequestError(
                f"{path} was fitted to another artifact of {self.model} ({self.artifact[:12]}…, not "
                f"{artifact[:12]}…): fit it again with nearfar route fit",
                "router",
            )

    def save(self, path: Path) -> None:
        """Write the router as JSON."""
        data = {"format": "nearfar-router", "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> FittedRouter:
        """Read a router. Raises RequestError for a file that is none."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("format") != "nearfar-router" or data.pop("version") != VERSION:
                raise ValueError(f"it is not a router of version {VERSION}")
            data["curve"] = tuple(Point(**point) for point in data["curve"])
            for name in ("features", "mean", "scale", "weights"):
                data[name] = tuple(data[name])
            made = cls(**data)
            made._check_sizes()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(
                f"{path} is not a router ({error}): make one with nearfar route fit", "router"
            ) from error
        return made

    def _check_sizes(self) -> None:
        numbers = (*self.mean, *self.scale, *self.weights, self.bias, self.threshold)
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in numbers):
            raise ValueError("not all its numbers are finite")
        if not len(self.features) == len(self.mean) == len(self.scale) == len(self.weights):
            raise ValueError("its features and weights differ in number")
        if unknown := set(self.features) - set(FEATURES):
            raise ValueError(f"it looks at {', '.join(sorted(unknown))}, which this version does not know")
        if min(self.scale, default=1.0) <= 0:
            raise ValueError("a scale must be positive")


def feature(knowledge: Mapping[str, Any], name: str) -> float | None:
    """A feature of a Knowledge; None where the model does not show it."""
    if name == "length":
        return math.log(max(knowledge["prompt_tokens"], 1))
    value = knowledge.get(name)
    return None if value is None else float(value)


def threshold_for(curve: Seq[Point], target: str) -> float:
    """The threshold of a target: "share=0.3" (at most that share to the cloud) or "quality=0.8" (the smallest
    share with at least that quality). Raises RequestError for another form, and a quality out of reach.
    """
    name, equals, text = target.partition("=")
    try:
        wanted = float(text)
    except ValueError:
        wanted = math.nan
    if not equals or name not in ("share", "quality") or not 0 <= wanted <= 1:
        raise RequestError(f"target must be share=0…1 or quality=0…1, not {target!r:.80}", "target")
    if name == "share":
        return max((p for p in curve if p.share <= wanted + 1e-9), key=lambda p: p.share).threshold
    reached = [point for point in curve if point.quality >= wanted - 1e-9]
    if not reached:
        best = max(point.quality for point in curve)
        raise RequestError(
            f"no share reaches quality {wanted:g}: the best of these examples is {best:.3f}", "target"
        )
    return min(reached, key=lambda point: point.share).threshold
