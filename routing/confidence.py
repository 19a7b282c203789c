"""Watches an answer while it is generated: log-probabilities, entropy and repetition show when a model goes
wrong.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nearfar.routing.policy import MonitorOptions
from nearfar.routing.types import Reason

FIRST_TOKENS = 16
"""The most first tokens of an answer that are kept for a fitted router."""

First = tuple[float, float]
"""A token of an answer's beginning: its log-probability, and the entropy of the likeliest tokens there."""

Doubt = Callable[[Seq[First], bool], Reason | None]
"""Why the cloud should answer instead, from the first tokens, and whether the answer has ended with them."""


@dataclass(frozen=True)
class Token:
    """A token of the answer. `top`: log-probabilities of the likeliest tokens, which may include the chosen
    one.
    """

    text: str
    logprob: float | None = None
    top: tuple[float, ...] = ()


def entropy(top: Seq[float]) -> float:
    """Lower bound of the entropy in nats: the probability that the given tokens leave counts as one more
    token.
    """
    given = [(math.exp(value), value) for value in top]
    rest = 1.0 - sum(p for p, _ in given)
    known = -sum(p * value for p, value in given if p > 0.0)
    return known - rest * math.log(rest) if rest > 1e-12 else known


class Monitor:
    """Watches the tokens of one answer, in order. `lowest_logprob` and `highest_entropy` are for
    calibration, `first` are the first tokens that had both figures. `doubt`: a fitted router's judgement of
    them, asked after each.
    """

    def __init__(
        self,
        options: MonitorOptions | None = None,
        doubt: Doubt | None = None,
    ) -> None:
        self._options = options or MonitorOptions()
        self._doubt = doubt
        self.first: list[First] = []
        self._logprobs: deque[float] = deque(maxlen=self._options.window)
        self._entropies: deque[float] = deque(maxlen=self._options.window)
        self._texts: deque[str] = deque(maxlen=self._options.period)
        self._runs = [0] * (
            self._options.period + 1
        )  # for each distance: how many tokens in a row equal the token at that distance before them
        self._count = 0
        self.lowest_logprob: float | None = None
        self.highest_entropy: float | None = None

    def push(self, token: Token) -> Reason | None:
        """Take the next token. Returns why the answer should be escalated, or None to continue."""
        self._count += 1
        if token.logprob is not None:
            self._logprobs.append(
                max(token.logprob, -100.0)
            )  # one impossible token must not dominate every mean
        if token.top:
            self._entropies.append(entropy(token.top))
        period = self._repeat(token.text)
        if (doubtful := self._doubtful(token)) is not None:
            return doubtful
        if self._count < self._options.min_tokens:
            return None
        return self._low_logprob() or self._high_entropy() or period

    def _doubtful(self, token: Token) -> Reason | None:
        if token.logprob is None or not token.top or self._count > FIRST_TOKENS:
            return None
        self.first.append((self._logprobs[-1], self._entropies[-1]))
        return self._doubt(self.first, False) if self._doubt is not None else None

    def end(self) -> Reason | None:
        """Judge an answer that has ended before its router had enough tokens; None: the answer may stay."""
        return self._doubt(self.first, True) if self._doubt is not None else None

    def _low_logprob(self) -> Reason | None:
        if not self._logprobs:
            return None
        mean, limit = sum(self._logprobs) / len(self._logprobs), self._options.logprob
        self.lowest_logprob = mean if self.lowest_logprob is None else min(self.lowest_logprob, mean)
        return Reason("low_logprob", "device", mean, limit) if limit is not None and mean < limit else None

    def _high_entropy(self) -> Reason | None:
        if not self._entropies:
            return None
        mean, limit = sum(self._entropies) / len(self._entropies), self._options.entropy
        self.highest_entropy = mean if self.highest_entropy is None else max(self.highest_entropy, mean)
        return Reason("high_entropy", "device", mean, limit) if limit is not None and mean > limit else None

    def _repeat(self, text: str) -> Reason | None:
        """Find the shortest period that ends with this token and has repeated often enough in a row."""
        for period in range(1, len(self._texts) + 1):
            same = self._texts[-period] == text
            self._runs[period] = self._runs[period] + 1 if same else 0
        self._texts.append(text)
        repeats = self._options.repeats
        if repeats is None:
            return None
        for period in range(1, self._options.period + 1):
            # A run of r equal tokens at distance p means r + p tokens that repeat one period.
            length = self._runs[period] + period
            if self._runs[period] and length >= max(repeats * period, self._options.min_repeat):
                return Reason("repetition", "device", length, period)
        return None
