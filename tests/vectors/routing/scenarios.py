"""The inputs of the vectors; record.py adds Python's results."""

from __future__ import annotations

import random
from typing import Any

Json = dict[str, Any]

ALL = ["tools", "json_schema", "json_object", "grammar", "images", "logprobs", "reasoning"]
REQUEST: Json = {
    "prompt_tokens": 100,
    "max_tokens": 200,
    "expected_tokens": None,
    "features": [],
    "difficulty": 0.2,
    "mode": None,
    "private": False,
    "quotes_private": False,
    "conversation": {"last_route": None, "cached_device": 0, "cached_cloud": 0, "spent": 0},
}
DEVICE: Json = {
    "available": True,
    "why": None,
    "context": 2048,
    "free_kv_tokens": 2048,
    "features": ["logprobs"],
    "prefill_tps": 400.0,
    "decode_tps": 40.0,
    "queue_seconds": 0,
    "battery": None,
    "charging": None,
    "power_saver": None,
    "here": True,
}
CLOUD: Json = {
    "available": True,
    "why": None,
    "breaker": "closed",
    "retry_after": 0,
    "context": 32768,
    "features": ALL,
    "round_trip": 0.3,
    "queue_seconds": 0,
    "prefill_tps": 5000.0,
    "decode_tps": 80.0,
    "metered": None,
    "price_in": 0.5,
    "price_out": 2.0,
}
POLICY: Json = {
    "mode": "auto",
    "difficulty_threshold": 0.5,
    "ttft": 2.0,
    "completion": None,
    "battery_floor": 0.2,
    "budget_conversation": None,
    "budget_day": None,
    "budget_unit": "tokens",
    "spent_day": 0,
    "sticky_seconds": 1.0,
}


def _case(name: str, request: Json = {}, device: Json = {}, cloud: Json = {}, policy: Json = {}) -> Json:  # noqa: B006
    conversation = {**REQUEST["conversation"], **request.get("conversation", {})}
    return {
        "name": name,
        "request": {**REQUEST, **request, "conversation": conversation},
        "device": {**DEVICE, **device},
        "cloud": {**CLOUD, **cloud},
        "policy": {**POLICY, **policy},
    }


DOWN = {"available": False, "why": "offline"}
WARM = {"last_route": "cloud", "cached_cloud": 600}

DECISIONS = [
    _case("easy stays"),
    _case("easy, difficulty unknown", {"difficulty": None}),
    _case("hard goes", {"difficulty": 0.9}),
    _case("difficulty at the threshold goes", {"difficulty": 0.5}),
    _case("hard, but the cloud is offline: degraded", {"difficulty": 0.9}, cloud=DOWN),
    _case("easy and offline: not degraded", cloud=DOWN),
    _case("easy, device lost", device={"available": False, "why": "device lost"}),
    _case("nothing is there", device={"available": False, "why": "no artifact"}, cloud=DOWN),
    _case("too long for the context", {"prompt_tokens": 2000}),
    _case("just fits the context", {"prompt_tokens": 1848}, policy={"ttft": None}),
    _case("too long for the KV memory", device={"free_kv_tokens": 299}),
    _case("too long for both", {"prompt_tokens": 40000}),
    _case("context of the cloud unknown", {"prompt_tokens": 40000}, cloud={"context": None}),
    _case("tools go", {"features": ["tools"]}),
    _case("two features missing, sorted", {"features": ["tools", "json_schema"]}),
    _case("logprobs stay", {"features": ["logprobs"]}),
    _case("images nowhere", {"features": ["images"]}, cloud={"features": []}),
    _case("long prompt is slow on the device", {"prompt_tokens": 1200}),
    _case("slow, but the cloud is slower", {"prompt_tokens": 1200}, cloud={"round_trip": 9.0}),
    _case("slow, the cloud not measured", {"prompt_tokens": 1200}, cloud={"round_trip": None}),
    _case(
        "a warm cache makes a long prompt fast",
        {"prompt_tokens": 1200, "conversation": {"last_route": "device", "cached_device": 1100}},
    ),
    _case("slow because of a queue", device={"queue_seconds": 3.0}),
    _case("completion too slow", policy={"completion": 3.0}),
    _case("completion: expected tokens count", {"expected_tokens": 20}, policy={"completion": 3.0}),
    _case("completion: expected beyond the limit", {"expected_tokens": 900}, policy={"completion": 3.0}),
    _case("completion: cloud slower", cloud={"decode_tps": 10.0}, policy={"completion": 3.0}),
    _case("speed unknown", device={"prefill_tps": None}),
    _case("low battery", device={"battery": 0.1, "charging": False}),
    _case("low battery, charging", device={"battery": 0.1, "charging": True}),
    _case("battery at the floor", device={"battery": 0.2}),
    _case("power saver", device={"power_saver": True}),
    _case("power saver, metered network", device={"power_saver": True}, cloud={"metered": True}),
    _case("hard on a metered network", {"difficulty": 0.9}, cloud={"metered": True}),
    _case("sticky: warm in the cloud", {"prompt_tokens": 700, "conversation": WARM}),
    _case("sticky: re-prefill cheap enough", {"prompt_tokens": 350, "conversation": WARM}),
    _case("sticky: speed unknown", {"prompt_tokens": 700, "conversation": WARM}, {"prefill_tps": None}),
    _case("sticky: device as warm", {"prompt_tokens": 700, "conversation": {**WARM, "cached_device": 600}}),
    _case("sticky: metered", {"prompt_tokens": 700, "conversation": WARM}, cloud={"metered": True}),
    _case(
        "sticky on the device, hard goes",
        {"difficulty": 0.8, "conversation": {"last_route": "device", "cached_device": 90}},
    ),
    _case(
        "budget of the conversation",
        {"difficulty": 0.9, "conversation": {"spent": 800}},
        policy={"budget_conversation": 1000},
    ),
    _case(
        "budget just reached",
        {"difficulty": 0.9, "conversation": {"spent": 700}},
        policy={"budget_conversation": 1000},
    ),
    _case("budget of the day", {"difficulty": 0.9}, policy={"budget_day": 10000, "spent_day": 9900}),
    _case(
        "budget in money",
        {"difficulty": 0.9},
        policy={"budget_day": 0.001, "budget_unit": "money", "spent_day": 0.0006},
    ),
    _case("budget gone and device too small", {"prompt_tokens": 3000}, policy={"budget_day": 100}),
    _case("budget does not bind cloud_only", policy={"mode": "cloud_only", "budget_day": 100}),
    _case("breaker open", {"difficulty": 0.9}, cloud={"breaker": "open", "retry_after": 4.5}),
    _case("breaker half open: a probe", {"difficulty": 0.9}, cloud={"breaker": "half_open"}),
    _case("asked to wait", {"difficulty": 0.9}, cloud={"retry_after": 7}),
    _case("private, hard", {"private": True, "difficulty": 0.9}),
    _case("private by a quotation", {"private": True, "quotes_private": True}),
    _case("private, too long", {"private": True, "prompt_tokens": 4000}),
    _case("private beats cloud_only", {"private": True, "mode": "cloud_only"}),
    _case("private, and the device is a relay", {"private": True}, {"here": False}),
    _case("a relay takes what is not private", device={"here": False}),
    _case("private, device lost", {"private": True}, {"available": False, "why": "device lost"}),
    _case("device_only", {"difficulty": 0.9}, policy={"mode": "device_only"}),
    _case(
        "device_only of the request",
        {"difficulty": 0.9, "mode": "device_only"},
        policy={"mode": "cloud_only"},
    ),
    _case("prefer_device, hard", {"difficulty": 0.9}, policy={"mode": "prefer_device"}),
    _case("prefer_device, too long", {"prompt_tokens": 4000}, policy={"mode": "prefer_device"}),
    _case("prefer_cloud, easy", policy={"mode": "prefer_cloud"}),
    _case("prefer_cloud, offline: degraded", cloud=DOWN, policy={"mode": "prefer_cloud"}),
    _case(
        "prefer_cloud, down for another reason",
        cloud={"available": False, "why": "no key"},
        policy={"mode": "prefer_cloud"},
    ),
    _case("cloud_only", policy={"mode": "cloud_only"}),
    _case("cloud_only, offline", cloud=DOWN, policy={"mode": "cloud_only"}),
    _case("auto of the request over prefer_cloud", {"mode": "auto"}, policy={"mode": "prefer_cloud"}),
    _case("threshold 1: only certain ones go", {"difficulty": 0.99}, policy={"difficulty_threshold": 1.0}),
    _case("empty numbers", {"prompt_tokens": 0, "max_tokens": 1}, {"context": 1, "free_kv_tokens": 1}),
]


def random_case(number: int, rng: random.Random) -> Json:
    """A random state."""

    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.3 else value

    def features(share: float) -> list[str]:
        return [name for name in ALL if rng.random() < share]

    def figure(high: float) -> float:
        return round(rng.uniform(0, high), 3)

    modes = ["device_only", "prefer_device", "auto", "prefer_cloud", "cloud_only"]
    reasons = ["offline", "no key", None]
    return {
        "name": f"random {number}",
        "request": {
            "prompt_tokens": rng.randrange(3000),
            "max_tokens": rng.randrange(1, 1000),
            "expected_tokens": maybe(rng.randrange(900)),
            "features": features(0.1),
            "difficulty": maybe(figure(1)),
            "mode": rng.choice([*modes, *[None] * 8]),
            "private": rng.random() < 0.1,
            "quotes_private": False,
            "conversation": {
                "last_route": rng.choice(["device", "cloud", None]),
                "cached_device": rng.randrange(2000),
                "cached_cloud": rng.randrange(2000),
                "spent": rng.randrange(5000),
            },
        },
        "device": {
            "available": rng.random() < 0.9,
            "why": maybe("lost"),
            "here": rng.random() < 0.9,
            "context": rng.choice([512, 2048, 4096]),
            "free_kv_tokens": rng.randrange(4096),
            "features": features(0.7),
            "prefill_tps": maybe(figure(2000)),
            "decode_tps": maybe(figure(100)),
            "queue_seconds": figure(2),
            "battery": maybe(figure(1)),
            "charging": maybe(rng.random() < 0.5),
            "power_saver": maybe(rng.random() < 0.2),
        },
        "cloud": {
            "available": rng.random() < 0.85,
            "why": rng.choice(reasons),
            "retry_after": maybe(figure(9)) or 0,
            "breaker": rng.choice(["closed"] * 6 + ["half_open", "open"]),
            "context": maybe(rng.choice([2048, 8192])),
            "features": features(0.95),
            "round_trip": maybe(figure(2)),
            "queue_seconds": figure(1),
            "prefill_tps": maybe(figure(9000)),
            "decode_tps": maybe(figure(200)),
            "metered": maybe(rng.random() < 0.3),
            "price_in": figure(3),
            "price_out": figure(9),
        },
        "policy": {
            "mode": rng.choice([*modes, *["auto"] * 8]),
            "difficulty_threshold": figure(1),
            "ttft": maybe(figure(4)),
            "completion": maybe(figure(30)),
            "battery_floor": figure(0.5),
            "budget_conversation": maybe(rng.randrange(9000)),
            "budget_day": maybe(rng.randrange(90000)),
            "budget_unit": rng.choice(["tokens", "tokens", "money"]),
            "spent_day": rng.randrange(60000),
            "sticky_seconds": figure(3),
        },
    }


def _steps(*steps: tuple[Any, ...]) -> list[Json]:
    return [{"op": op, "args": args} for op, args in steps]


def _tokens(texts: list[str], logprobs: list[float | None], top: list[float] | None = None) -> list[Json]:
    return _steps(*(("push", {"text": text, "logprob": value, "top": top or []})
                    for text, value in zip(texts, logprobs, strict=True)))  # fmt: skip


def _failures(start: float, count: int) -> list[tuple[str, Json]]:
    return [pair for i in range(count) for pair in
            (("begin", {"now": start + i}), ("failure", {"now": start + i, "given": "request"}))]  # fmt: skip


def machines() -> dict[str, list[Json]]:
    """Scenarios of each kind of machine, by file."""
    rng = random.Random(5)
    words = [f"w{i}" for i in range(60)]
    return {
        "breaker": [
            {
                "name": "opens, probes one at a time, closes",
                "config": {"failures": 3, "seconds": 5, "max_seconds": 300},
                "steps": _steps(
                    *_failures(0, 3),
                    ("begin", {"now": 3}),
                    ("look", {"now": 6.5}),
                    ("begin", {"now": 7}),
                    ("begin", {"now": 7.5}),
                    ("success", {"now": 8, "given": "probe"}),
                    ("begin", {"now": 8}),
                ),
            },
            {
                "name": "failed probes double the time, up to the bound",
                "config": {"failures": 1, "seconds": 10, "max_seconds": 35},
                "steps": _steps(
                    *_failures(0, 1),
                    ("begin", {"now": 10}),
                    ("failure", {"now": 11, "given": "probe"}),
                    ("look", {"now": 30.9}),
                    ("begin", {"now": 31}),
                    ("failure", {"now": 32, "given": "probe"}),
                    ("begin", {"now": 66.9}),
                    ("begin", {"now": 67}),
                    ("failure", {"now": 67, "given": "probe"}),
                    ("begin", {"now": 102}),
                    ("success", {"now": 102, "given": "probe"}),
                    *_failures(103, 1),
                    ("look", {"now": 112.9}),
                    ("look", {"now": 113}),
                ),
            },
            {
                "name": "a success in between starts the count again",
                "config": {"failures": 2},
                "steps": _steps(
                    *_failures(0, 1),
                    ("begin", {"now": 1}),
                    ("success", {"now": 1, "given": "request"}),
                    *_failures(2, 1),
                    ("look", {"now": 2}),
                    *_failures(3, 1),
                    ("look", {"now": 3}),
                ),
            },
            {
                "name": "late answers from before it opened change nothing",
                "config": {"failures": 1, "seconds": 5},
                "steps": _steps(
                    ("begin", {"now": 0}),
                    *_failures(1, 1),
                    ("success", {"now": 2, "given": "request"}),
                    ("begin", {"now": 6}),
                    ("failure", {"now": 6, "given": "request"}),
                    ("look", {"now": 6}),
                    ("success", {"now": 7, "given": "probe"}),
                ),
            },
            {
                "name": "an abandoned probe lets the next one go",
                "config": {"failures": 1, "seconds": 5},
                "steps": _steps(
                    *_failures(0, 1),
                    ("begin", {"now": 5}),
                    ("begin", {"now": 5}),
                    ("abandoned", {"now": 6, "given": "probe"}),
                    ("begin", {"now": 6}),
                ),
            },
            {
                "name": "hold: the cloud asked for silence",
                "config": {},
                "steps": _steps(
                    ("hold", {"now": 1, "seconds": 4}),
                    ("begin", {"now": 2}),
                    ("hold", {"now": 2, "seconds": 1}),
                    ("look", {"now": 4.5}),
                    ("begin", {"now": 5}),
                ),
            },
        ],
        "retry": [
            {
                "name": "backoff",
                "config": {"attempts": 3, "base": 0.5, "cap": 1.5, "max_wait": 4},
                "steps": _steps(
                    *(
                        ("backoff", {"attempt": attempt, "random": value, "retry_after": after})
                        for attempt in range(4)
                        for value in (0.0, 0.25, 0.999)
                        for after in (None, 0, 2.0, 5.0)
                    )
                ),
            },
            {
                "name": "budget",
                "config": {"ratio": 0.5, "burst": 2},
                "steps": _steps(
                    *(
                        (op, {})
                        for op in (
                            "withdraw",
                            "withdraw",
                            "withdraw",
                            "request",
                            "withdraw",
                            "request",
                            "withdraw",
                            "request",
                            "request",
                            "request",
                            "request",
                            "request",
                            "withdraw",
                        )
                    )
                ),
            },
        ],
        "calibration": [
            {
                "name": "a fifth goes",
                "config": {"share": 0.2, "start": 0.5},
                "steps": _steps(*(("observe", {"difficulty": round(rng.random(), 4)}) for _ in range(300))),
            },
            {
                "name": "bounds hold",
                "config": {"share": 0.5, "start": 0.99, "options": {"rate": 0.5, "floor": 0.1}},
                "steps": _steps(
                    *(
                        ("observe", {"difficulty": value})
                        for value in (1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
                    )
                ),
            },
            {
                "name": "limits from a sample",
                "config": {"share": 0.5, "start": 0.5},
                "steps": _steps(
                    *(
                        ("limit_for", {"values": [-0.3, -2.0, -1.0, -0.1, -0.7], "share": share})
                        for share in (0.0, 0.2, 0.39, 0.4, 0.99, 1.0)
                    )
                ),
            },
        ],
        "confidence": [
            {
                "name": "logprobs fall",
                "config": {"window": 4, "min_tokens": 3, "logprob": -1.0},
                "steps": _tokens(words[:9], [-5.0, -0.1, -0.2, -0.1, -0.2, -0.9, -2.5, -2.0, -3.0]),
            },
            {
                "name": "an impossible token is bounded",
                "config": {"window": 8, "min_tokens": 2, "logprob": -20.0},
                "steps": _tokens(words[:6], [-0.1, -9999.0, -0.1, -0.1, -0.1, -0.1]),
            },
            {
                "name": "entropy",
                "config": {"window": 3, "min_tokens": 2, "entropy": 1.2},
                "steps": [
                    *_tokens(words[:2], [-0.1, -0.1], [-0.1, -3.0, -4.0]),
                    *_tokens(words[2:6], [-1.4] * 4, [-1.4, -1.4, -1.5, -1.6]),
                    *_tokens(words[6:7], [-0.0], [0.0, -50.0]),
                ],
            },
            {
                "name": "one word over and over",
                "config": {"repeats": 4, "period": 8, "min_repeat": 6},
                "steps": _tokens(["a", "b", *["no"] * 8], [None] * 10),
            },
            {
                "name": "a phrase over and over",
                "config": {"repeats": 3, "period": 8, "min_repeat": 6},
                "steps": _tokens([*words[:5], *["the", " fox", " and", " so"] * 4], [-0.2] * 21),
            },
            {
                "name": "a phrase longer than the period",
                "config": {"repeats": 2, "period": 3, "min_repeat": 4},
                "steps": _tokens(["a", "b", "c", "d"] * 4, [-0.2] * 16),
            },
            {
                "name": "nothing is watched",
                "config": {"repeats": None, "window": 4, "min_tokens": 1},
                "steps": _tokens(["x"] * 12, [-7.0] * 12, [-7.0, -0.2]),
            },
            {
                "name": "defaults",
                "config": {},
                "steps": _tokens(
                    ["x", "y"] * 16, [round(-3 * rng.random(), 3) for _ in range(32)], [-0.5, -1.5, -2.5]
                ),
            },
        ],
        "ledger": [
            {
                "name": "reserve and settle",
                "config": {},
                "steps": _steps(
                    ("spent_day", {"day": "2026-01-01"}),
                    ("reserve", {"conversation": "a", "cost": 100}),
                    ("reserve", {"conversation": None, "cost": 30}),
                    ("spent_day", {"day": "2026-01-01"}),
                    ("spent_conversation", {"conversation": "a"}),
                    ("settle", {"number": 1, "day": "2026-01-01", "cost": 40}),
                    ("settle", {"number": 1, "day": "2026-01-01", "cost": 40}),
                    ("spent_day", {"day": "2026-01-01"}),
                    ("spent_conversation", {"conversation": "a"}),
                    ("spent_conversation", {"conversation": "b"}),
                    ("settle", {"number": 2, "day": "2026-01-02", "cost": 7}),
                    ("spent_day", {"day": "2026-01-01"}),
                    ("spent_day", {"day": "2026-01-02"}),
                    ("spent_conversation", {"conversation": None}),
                    ("settle", {"number": 9, "day": "2026-01-02", "cost": 7}),
                ),
            },
            {
                "name": "money, several conversations",
                "config": {},
                "steps": _steps(
                    ("reserve", {"conversation": "a", "cost": 0.25}),
                    ("reserve", {"conversation": "b", "cost": 0.5}),
                    ("settle", {"number": 2, "day": "d", "cost": 0.125}),
                    ("reserve", {"conversation": "b", "cost": 1}),
                    ("spent_conversation", {"conversation": "b"}),
                    ("settle", {"number": 3, "day": "d", "cost": 0}),
                    ("settle", {"number": 1, "day": "d", "cost": 0.25}),
                    ("spent_day", {"day": "d"}),
                ),
            },
        ],
        "speed": [
            {
                "name": "means",
                "config": {},
                "steps": _steps(
                    ("prefill", {"tokens": 100, "seconds": 0.5}),
                    ("prefill", {"tokens": 15, "seconds": 0.001}),
                    ("prefill", {"tokens": 300, "seconds": 1.0}),
                    ("decode", {"tokens": 50, "seconds": 2.0}),
                    ("decode", {"tokens": 3, "seconds": 2.0}),
                    ("decode", {"tokens": 10, "seconds": 1.0}),
                    ("first_token", {"seconds": 1.0, "uncached_tokens": 46}),
                    ("first_token", {"seconds": 0.1, "uncached_tokens": 460}),
                    ("prefill", {"tokens": 100, "seconds": 0}),
                ),
            },
            {
                "name": "round trip, prefill unknown",
                "config": {},
                "steps": _steps(
                    ("first_token", {"seconds": 0.4, "uncached_tokens": 1000}),
                    ("first_token", {"seconds": 0.8, "uncached_tokens": 1000}),
                ),
            },
        ],
    }
