"""Computes the figures of a level: percentiles, rates, goodput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nearfar.fallback_server.bench.client import Outcome
from nearfar.fallback_server.bench.load import LoadResult
from nearfar.fallback_server.bench.options import Slo


@dataclass(frozen=True)
class Distribution:
    """The distribution of a quantity in seconds; all 0 where nothing was measured."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@dataclass(frozen=True)
class LevelFigures:
    """Figures of one level. Rates are per second, over the whole level.

    `good` is the fraction of all requests sent that ended well and within the SLO, `goodput` the number of
    these per second. `lag`: how late the client sent, in seconds. `prompt_error`: mean distance of prompts
    from the wanted length, in tokens (None: unknown). `ttft_curve`, `tpot_curve`: at most 100 points
    (fraction of requests, seconds) of the distribution, for plots.
    """

    name: str
    mode: str
    load: float
    seconds: float
    requests: int
    ok: int
    unfinished: int
    errors: dict[str, int]
    examples: dict[str, str]
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    output_tokens: int
    prompt_tokens: int
    cached_part: float
    short_answers: int
    prompt_error: float | None
    goodput: float
    good: float
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    lag: Distribution
    ttft_curve: tuple[tuple[float, float], ...]
    tpot_curve: tuple[tuple[float, float], ...]
    interrupted: bool


def level(name: str, mode: str, load: float, run: LoadResult, slo: Slo) -> LevelFigures:
    """Compute the figures of a level. Latencies are of the requests that ended well; failed requests count
    for no rate.
    """
    ok = [outcome for outcome in run.outcomes if outcome.error is None]
    failed = [outcome for outcome in run.outcomes if outcome.error is not None]
    seconds = max(run.seconds, 1e-9)
    good = sum(within(outcome, slo) for outcome in ok)
    prompt = sum(_prompt(outcome) for outcome in ok)
    output = sum(outcome.output for outcome in ok)
    known = [abs(o.prompt_tokens - o.wanted_prompt) for o in ok if o.prompt_tokens is not None]
    ttft = _present(outcome.ttft for outcome in ok)
    tpot = _present(outcome.tpot for outcome in ok)
    return LevelFigures(
        name,
        mode,
        load,
        run.seconds,
        len(run.outcomes),
        len(ok),
        run.unfinished,
        dict(Counter(o.error for o in failed if o.error)),
        {o.error: o.message for o in reversed(failed) if o.error},
        len(ok) / seconds,
        output / seconds,
        prompt / seconds,
        output,
        prompt,
        sum(o.cached_tokens for o in ok) / prompt if prompt else 0.0,
        sum(o.output < o.wanted_output for o in ok),
        sum(known) / len(known) if known else None,
        good / seconds,
        good / len(run.outcomes) if run.outcomes else 0.0,
        summary(ttft),
        summary(tpot),
        summary([gap for o in ok for gap in o.gaps]),
        summary([o.e2e for o in ok]),
        summary([o.sent - o.due for o in run.outcomes]),
        curve(ttft),
        curve(tpot),
        run.interrupted,
    )


def within(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request that ended well kept the SLO. An answer of one token has no TPOT and keeps that
    bound.
    """
    return outcome.ttft is not None and outcome.ttft <= slo.ttft and (outcome.tpot or 0.0) <= slo.tpot


def percentile(ordered: Sequence[float], part: float) -> float:
    """A percentile of sorted values, interpolated between the two nearest ranks (numpy's "linear", type 7 of
    Hyndman and Fan). `part` is in [0, 1].
    """
    place = (len(ordered) - 1) * part
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(values: Sequence[float]) -> Distribution:
    """Return count, mean, percentiles and maximum of the values."""
    if not values:
        return Distribution()
    ordered = sorted(values)
    p50, p95, p99 = (percentile(ordered, part) for part in (0.5, 0.95, 0.99))
    return Distribution(len(ordered), math.fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


def curve(values: Sequence[float], points: int = 100) -> tuple[tuple[float, float], ...]:
    """Return points of the distribution: (fraction of the values, the value that they do not exceed)."""
    if not values:
        return ()
    ordered = sorted(values)
    parts = [index / (points - 1) for index in range(points)]
    return tuple((part, percentile(ordered, part)) for part in parts)


def _prompt(outcome: Outcome) -> int:
    return outcome.wanted_prompt if outcome.prompt_tokens is None else outcome.prompt_tokens


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
