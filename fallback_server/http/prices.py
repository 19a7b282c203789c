"""What tokens cost, for the metrics: prices of models for a million tokens, in any currency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import TokenUsage

MILLION = 1_000_000
ANY = "*"
"""Stands for all models that have no price of their own."""


@dataclass(frozen=True)
class Price:
    """The prices of a million tokens: of prompts, of answers, and of prompt tokens found in a cache."""

    prompt: float
    answer: float
    cached: float

    def cost(self, usage: TokenUsage) -> float:
        """Return the cost of a request."""
        fresh = usage.prompt - usage.cached
        return (fresh * self.prompt + usage.cached * self.cached + usage.completion * self.answer) / MILLION


def parse_prices(given: Iterable[str]) -> dict[str, Price]:
    """Parse values of --price, MODEL=PROMPT,ANSWER[,CACHED]. Without CACHED, tokens found in a cache cost as
    much as others. Raises RequestError for an invalid one.
    """
    made: dict[str, Price] = {}
    for text in given:
        model, _, numbers = text.rpartition("=")
        try:
            prompt, answer, *rest = [float(part) for part in numbers.split(",")]
            (cached,) = rest or (prompt,)
        except ValueError:
            model = ""
        if not model or not all(0 <= each < math.inf for each in (prompt, answer, cached)):
            raise RequestError(
                f"--price must be MODEL=PROMPT,ANSWER or MODEL=PROMPT,ANSWER,CACHED, the prices of a million "
                f"tokens, not {text!r:.80}",
                "price",
            )
        if model in made:
            raise RequestError(f"--price has two prices for {model!r:.80}: give one", "price")
        made[model] = Price(prompt, answer, cached)
    return made


def price_of(prices: Mapping[str, Price], model: str) -> Price | None:
    """Return the price of a model; None where none is given."""
    return prices.get(model) or prices.get(ANY)
