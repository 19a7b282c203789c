"""Computes the difficulty of a prompt. web/src/routing/difficulty.ts computes the same from the same
model.json.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nearfar.errors import NearfarError
from nearfar.routing.difficulty.features import Lexicon, features

MODEL = Path(__file__).with_name("model.json")
FORMAT = 1
CLIP = 4.0
"""Largest number of standard deviations that a standardized feature counts for, so that an odd prompt stays
on the scale.
"""
SAMPLES = {"open": "", "choice": "?\nA. 1\nB. 2"}
"""A sample prompt of each kind, to find out which features it has."""
SHORT = 80
"""A last message of fewer code points ("and why?") is read together with the user's message before it."""


@dataclass(frozen=True)
class LinearHead:
    """One linear model. It estimates the probability that the small model fails where the large one
    succeeds.
    """

    features: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    slope: float
    intercept: float

    def linear(self, found: Mapping[str, float]) -> float:
        """Return the weighted sum of the standardized features."""
        total = 0.0
        for name, mean, scale, weight in zip(self.features, self.mean, self.scale, self.weights, strict=True):
            total += weight * max(-CLIP, min(CLIP, (found[name] - mean) / scale))
        return total

    def probability(self, found: Mapping[str, float]) -> float:
        """Return the calibrated probability, a logistic curve of `linear`."""
        return 1.0 / (
            1.0 + math.exp(-max(-30.0, min(30.0, self.slope * self.linear(found) + self.intercept)))
        )


@dataclass(frozen=True)
class Difficulty:
    """The trained model: `choice` for multiple-choice prompts, `open` for all others.

    `knots`: rising probabilities at evenly spaced shares of the reference prompts; they convert a probability
    to a rank.
    """

    categories: tuple[str, ...]
    lexicon: Lexicon
    open: LinearHead
    choice: LinearHead
    knots: tuple[float, ...]

    @classmethod
    def load(cls, path: Path = MODEL) -> Difficulty:
        """Read a model that scripts/train_difficulty.py wrote. Raises NearfarError for another file."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NearfarError(
                f"{path} is not a difficulty model ({error}); scripts/train_difficulty.py writes one"
            ) from None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Difficulty:
        """Build the model from model.json's data. Raises ValueError for another format."""
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}; this version reads {FORMAT}")
        categories, lexicon = tuple(data["categories"]), lexicon_of(data["categories"])
        heads = {name: _head(data["heads"][name]) for name in ("open", "choice")}
        for name, head in heads.items():
            known = features(SAMPLES[name], categories, lexicon)[1]
            if missing := [feature for feature in head.features if feature not in known]:
                raise ValueError(f"{name}: unknown features {', '.join(missing)}")
        return cls(categories, lexicon, **heads, knots=tuple(data["knots"]))

    def probability(self, prompt: str) -> float:
        """Estimate the probability that the small model fails where the large one succeeds."""
        choice, found = features(prompt, self.categories, self.lexicon)
        return (self.choice if choice else self.open).probability(found)

    def score(self, prompt: str) -> float:
        """Return the share of the reference prompts that look easier, in [0, 1]. Any string has a score."""
        return rank(self.probability(prompt), self.knots)


def rank(value: float, knots: Sequence[float]) -> float:
    """Return the rank of a value among rising knots, linear between them: 0 below the first, 1 above the
    last.
    """
    if value <= knots[0] or value >= knots[-1]:
        return 0.0 if value <= knots[0] else 1.0
    at = bisect_right(knots, value)
    low, high = knots[at - 1], knots[at]
    return (at - 1 + (value - low) / (high - low)) / (len(knots) - 1)


def lexicon_of(categories: Mapping[str, str]) -> Lexicon:
    """Map words to category numbers, from `{"category": "word word …"}`."""
    found: dict[str, list[int]] = {}
    for at, words in enumerate(categories.values()):
        for word in words.split():
            found.setdefault(word, []).append(at)
    return found


def messages_to_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text to score: the last user message, and the one before it if the last is short.

    System prompts are left out: they are the same for hard and for easy questions. A message in parts
    contributes its text parts.
    """
    texts = [text_of(message.get("content")) for message in messages if message.get("role") == "user"]
    if not texts:
        return ""
    return "\n".join(texts[-2:]) if len(texts[-1]) < SHORT else texts[-1]


def text_of(content: object) -> str:
    """Return the text of a message's content: a string, or the text parts of a list, one per line."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(
        str(part.get("text", "")) for part in parts if isinstance(part, dict) and part.get("type") == "text"
    )


def score(prompt: str) -> float:
    """Score a prompt by the model that comes with nearfar."""
    return _shipped().score(prompt)


@cache
def _shipped() -> Difficulty:
    return Difficulty.load()


def _head(data: Mapping[str, Any]) -> LinearHead:
    lists = {name: tuple(data[name]) for name in ("features", "mean", "scale", "weights")}
    if len({len(value) for value in lists.values()}) != 1:
        raise ValueError("features, mean, scale and weights differ in length")
    return LinearHead(**lists, slope=data["slope"], intercept=data["intercept"])
