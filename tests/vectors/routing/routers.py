"""A fitted router for the vectors: prompts that it judges, and changes that make its file invalid."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

ROUTER: dict[str, Any] = {
    "format": "nearfar-router",
    "version": 2,
    "model": "sample",
    "artifact": f"{'a' * 64}/q4",
    "examples": 200,
    "prompt": {
        "features": ["length", "entropy", "best", "margin", "prompt_logprob", "sure"],
        "mean": [4.0, 1.5, -0.8, 1.2, -3.0, 0.1],
        "scale": [1.0, 0.7, 0.5, 1.0, 1.5, 2.0],
        "weights": [0.4, 0.9, -0.3, -0.6, -0.2, -1.1],
        "bias": -0.25,
        "auroc": 0.8,
        "probe": {"tokens": [40, 3, 11, 7], "weights": [0.31, -0.12, 0.05, -0.4], "mean": 0.2},
    },
    "threshold": 0.55,
    "answer": {
        "features": ["entropy", "mean_logprob", "lowest_logprob", "mean_entropy", "highest_entropy"],
        "mean": [1.5, -0.5, -2.0, 0.8, 1.9],
        "scale": [0.7, 0.4, 1.0, 0.5, 0.6],
        "weights": [0.3, -0.8, -0.2, 0.7, 0.5],
        "bias": -2.0,
        "auroc": 0.85,
        "probe": {"tokens": [11, 90], "weights": [0.2, -0.3], "mean": -0.1},
    },
    "limit": 0.6,
    "tokens": 3,
    "curve": [
        {"share": 0, "threshold": 1, "limit": None, "quality": 0.3, "money": 0},
        {"share": 0.5, "threshold": 0.55, "limit": 0.6, "quality": 0.6, "money": 1.5},
        {"share": 1, "threshold": 0, "limit": None, "quality": 0.7, "money": 3},
    ],
}


BEGINNINGS = (
    (0, True), (2, False), (3, False), (3, False), (4, False), (2, True), (1, True), (3, True)
)  # fmt: skip
"""How many tokens of an answer have come, and whether it has ended with them."""


Number = Callable[[float, float], float]
"""Draws a number between two."""


def _whole(number: Number) -> list[list[float]]:
    return [[token, number(-12, -1)] for token in (90, 3, 40, 7, 11)]


ROWS: tuple[Callable[[Number], list[list[float]]], ...] = (
    lambda _: [],
    _whole,
    lambda number: _whole(number)[:-1],
)
"""Rows of a knowledge: none, all tokens of both probes in another order, and one token too few."""
PROBE = {"tokens": [1, 2], "weights": [0.5, 2], "mean": 0}
WRONG_PROBES: tuple[dict[str, Any], ...] = (
    {"tokens": [1, 1]}, {"tokens": [1, -2]}, {"tokens": [1, 2.5]}, {"tokens": [1]}, {"tokens": "12"},
    {"tokens": [], "weights": []}, {"weights": [1, "2"]}, {"mean": None}, {"more": 1},
)  # fmt: skip
VOCABULARIES = (1, 100, 128, 255, 256, 32000, 151936)
"""Sizes of vocabularies of which `row_tokens` takes some."""


def cases() -> list[dict[str, Any]]:
    """Prompts with a model's knowledge about them and about the beginning of its answer."""
    rng = random.Random(41)

    def number(low: float, high: float) -> float:
        return round(rng.uniform(low, high), 4)

    made = []
    for count in (1, 3, 60, 800):
        for tokens, ended in BEGINNINGS:
            top = sorted((number(-6, -0.1) - 1.5 for _ in range(min(count, 20))), reverse=True)
            knowledge = {
                "prompt_tokens": count,
                "top": top,
                "prompt_logprob": rng.choice([None, number(-6, -1)]),
                "sure": rng.choice([None, number(-3, 3)]),
                "row": rng.choice(ROWS)(number),
            }
            first = [[number(-3, -0.01), number(0, 2.5)] for _ in range(tokens)]
            made.append({"knowledge": knowledge, "first": first, "ended": ended})
    made.append(
        {
            "knowledge": {"prompt_tokens": 0, "top": [], "prompt_logprob": None, "sure": None, "row": []},
            "first": [],
            "ended": False,
        }
    )
    return made


def refused() -> list[dict[str, Any]]:
    """Changes of fields after which the file is not a router."""
    prompt = ROUTER["prompt"]
    return [
        {"format": "x"},
        {"version": 1},
        {"model": 3},
        {"artifact": None},
        {"extra": 1},
        {"prompt": None},
        {"prompt": {**prompt, "weights": [1]}},
        {"prompt": {**prompt, "weights": "heavy!"}},
        {"prompt": {**prompt, "scale": [0, 1, 1, 1, 1, 1]}},
        {"prompt": {**prompt, "bias": None}},
        {"prompt": {**prompt, "bias": True}},
        {"prompt": {**prompt, "features": ["length", "mood", "best", "margin", "prompt_logprob", "sure"]}},
        {"prompt": {**prompt, "features": ["mean_logprob", *prompt["features"][1:]]}},
        {"prompt": {**prompt, "more": 1}},
        {"prompt": {**prompt, "probe": 3}},
        *({"prompt": {**prompt, "probe": {**PROBE, **change}}} for change in WRONG_PROBES),
        {"prompt": {**prompt, "probe": {"tokens": [1], "weights": [1]}}},
        {"threshold": "0.5"},
        {"answer": None},
        {"limit": "low"},
        {"tokens": 0},
        {"tokens": 17},
        {"tokens": 2.5},
        {"curve": []},
        {"curve": [{"share": 1}]},
        {"curve": [{**ROUTER["curve"][0], "quality": None}]},
    ]
