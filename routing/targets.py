"""Targets of a fitted router in the user's terms: how good answers must be, how many prompts may go to the
cloud, or what a thousand requests may cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from nearfar.errors import RequestError
from nearfar.routing.fitted import Point

FORMS = "share=0…1, quality=0…1 or money=… per thousand requests"


def point_for(curve: Seq[Point], target: str) -> Point:
    """The point of a target: "share=0.3" (at most that share to the cloud), "quality=0.8" (the smallest share
    with at least that quality) or "money=2.5" (the best quality for at most that price of a thousand
    requests). Raises RequestError for another form, for a quality out of reach, and for money without prices.
    """
    name, _, text = target.partition("=")
    wanted = _number(text)
    highest = {"share": 1.0, "quality": 1.0, "money": math.inf}.get(name)
    if highest is None or wanted is None or not 0 <= wanted <= highest:
        raise RequestError(f"target must be {FORMS}, not {target!r:.80}", "target")
    if name == "quality":
        return _cheapest(curve, wanted)
    if name == "share":
        return max((point for point in curve if point.share <= wanted + 1e-9), key=_by_share)
    priced = [(point.money, point) for point in curve if point.money is not None]
    if not priced:
        raise RequestError(
            "money needs prices, and these records have none: give Endpoint(price_in=…, price_out=…) when "
            "you record, or --price-in and --price-out when you fit",
            "target",
        )
    return max((point for money, point in priced if money <= wanted + 1e-9), key=_by_share)


def _by_share(point: Point) -> float:
    return point.share


def _cheapest(curve: Seq[Point], wanted: float) -> Point:
    reached = [point for point in curve if point.quality >= wanted - 1e-9]
    if not reached:
        best = max(point.quality for point in curve)
        raise RequestError(
            f"no share reaches quality {wanted:g}: the best of these examples is {best:.3f}", "target"
        )
    return min(reached, key=_by_share)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
