"""From log-probabilities of labels to a decision; the web engine does the same (tests/vectors/decisions)."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

Label = tuple[int, ...]


@dataclass(frozen=True)
class Odds:
    """The probability of each label among all labels, and how certain the choice is: 0 where all are equally
    likely, 1 where one has everything.
    """

    probabilities: tuple[float, ...]
    confidence: float

    @property
    def choice(self) -> int:
        """The index of the likeliest label, the first on ties."""
        return self.probabilities.index(max(self.probabilities))


def label_odds(labels: Seq[Label], logprobs: Seq[float], neutral: Seq[float] | None = None) -> Odds:
    """Normalize the probabilities of labels that answer a prompt.

    `labels`: their tokens. `logprobs`: the natural logarithm of the probability that an answer begins with
    each. Where a label begins another ("1" and "10"), its probability is that of an answer which begins with
    it and not with a longer one. `neutral`: the same of a prompt without content; dividing by its
    probabilities takes out what the model prefers whatever it is asked (Zhao et al., "Calibrate Before Use",
    2021).
    """
    weights = _alone(labels, logprobs)
    if neutral is not None:
        before = _alone(labels, neutral)
        weights = [weight - other for weight, other in zip(weights, before, strict=True)]
    most = max(weights)
    shares = [math.exp(weight - most) for weight in weights]
    total = sum(shares)
    found = tuple(share / total for share in shares)
    count = len(found)
    confidence = 1.0 if count == 1 else (max(found) * count - 1) / (count - 1)
    return Odds(found, min(max(confidence, 0.0), 1.0))


FLOOR = -1e4
"""Logarithm of a probability that has become nothing, so that two of them can be compared."""


def _alone(labels: Seq[Label], logprobs: Seq[float]) -> list[float]:
    """The logarithm of the probability that an answer begins with each label and with no longer one."""
    out = []
    for label, logprob in zip(labels, logprobs, strict=True):
        longer = [other for other in range(len(labels)) if _begins(label, labels[other])]
        # Of labels that begin each other, only the shortest counts: it contains the longer ones.
        nearest = [o for o in longer if not any(_begins(labels[p], labels[o]) for p in longer)]
        once = {labels[o]: logprobs[o] for o in nearest}
        rest = 1.0 - sum(math.exp(min(other - logprob, 0.0)) for other in once.values())
        out.append(max(logprob + math.log(rest), FLOOR) if rest > 1e-12 else FLOOR)
    return out


def _begins(label: Label, other: Label) -> bool:
    return len(label) < len(other) and other[: len(label)] == label
