"""Replays tests/vectors/routing on the Python side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearfar.remote.breaker import Breaker
from nearfar.routing.calibration import Threshold, limit_for
from nearfar.routing.confidence import Monitor, Token
from nearfar.routing.decision import decide
from nearfar.routing.ledger import Ledger
from nearfar.routing.policy import BreakerOptions, CalibrationOptions, MonitorOptions, Policy, RetryOptions
from nearfar.routing.retry import RetryBudget, backoff
from nearfar.routing.speed import Speeds
from nearfar.routing.types import CloudState, DeviceState, RouteRequest

VECTORS = Path(__file__).parents[1] / "vectors" / "routing"
Json = dict[str, Any]
Step = Callable[[str, Json], tuple[Any, Any]]
"""Runs one operation; gives its result and the state after it."""


def decision(case: Json) -> Json:
    request, device = RouteRequest.parse(case["request"]), DeviceState.parse(case["device"])
    return decide(request, device, CloudState.parse(case["cloud"]), Policy.parse(case["policy"])).as_json()


def breaker(config: Json) -> Step:
    made = Breaker(BreakerOptions(**config))

    def step(op: str, args: Json) -> tuple[Any, Any]:
        now = args.get("now", 0.0)
        match op:
            case "begin":
                result: Any = made.begin(now)
            case "success":
                result = made.success(args["given"])
            case "failure":
                result = made.failure(now, args["given"])
            case "abandoned":
                result = made.abandoned(args["given"])
            case "hold":
                result = made.hold(now, args["seconds"])
            case "look":
                result = None
            case _:
                raise ValueError(op)
        return result, {
            "state": made.state(now),
            "allows": made.allows(now),
            "retry_after": made.retry_after(now),
        }

    return step


def retry(config: Json) -> Step:
    options = RetryOptions(**config)
    budget = RetryBudget(options)

    def step(op: str, args: Json) -> tuple[Any, Any]:
        match op:
            case "backoff":
                result: Any = backoff(args["attempt"], args["random"], args["retry_after"], options)
            case "request":
                result = budget.request()
            case "withdraw":
                result = budget.withdraw()
            case _:
                raise ValueError(op)
        return result, {"left": budget.left}

    return step


def calibration(config: Json) -> Step:
    made = Threshold(config["share"], config["start"], CalibrationOptions(**config.get("options", {})))

    def step(op: str, args: Json) -> tuple[Any, Any]:
        match op:
            case "observe":
                result: Any = made.observe(args["difficulty"])
            case "limit_for":
                result = limit_for(args["values"], args["share"])
            case _:
                raise ValueError(op)
        return result, made.as_json()

    return step


def confidence(config: Json) -> Step:
    made = Monitor(MonitorOptions(**config))

    def step(op: str, args: Json) -> tuple[Any, Any]:
        assert op == "push"
        reason = made.push(Token(args["text"], args["logprob"], tuple(args["top"])))
        result = (
            None if reason is None else {"code": reason.code, "value": reason.value, "limit": reason.limit}
        )
        return result, {"lowest_logprob": made.lowest_logprob, "highest_entropy": made.highest_entropy}

    return step


def ledger(_: Json) -> Step:
    made = Ledger()

    def step(op: str, args: Json) -> tuple[Any, Any]:
        match op:
            case "reserve":
                result: Any = made.reserve(args["conversation"], args["cost"])
            case "settle":
                result = made.settle(args["number"], args["day"], args["cost"])
            case "spent_day":
                result = made.spent_day(args["day"])
            case "spent_conversation":
                result = made.spent_conversation(args["conversation"])
            case _:
                raise ValueError(op)
        return result, {**made.as_json(), "conversations": dict(made.as_json()["conversations"])}

    return step


def speed(_: Json) -> Step:
    made = Speeds()

    def step(op: str, args: Json) -> tuple[Any, Any]:
        match op:
            case "prefill":
                made.prefill(args["tokens"], args["seconds"])
            case "decode":
                made.decode(args["tokens"], args["seconds"])
            case "first_token":
                made.first_token(args["seconds"], args["uncached_tokens"])
            case _:
                raise ValueError(op)
        return None, made.as_json()

    return step


MACHINES: dict[str, Callable[[Json], Step]] = {
    "breaker": breaker,
    "retry": retry,
    "calibration": calibration,
    "confidence": confidence,
    "ledger": ledger,
    "speed": speed,
}
"""For each file, the function that makes its machine from a scenario's config."""


def same(found: Any, recorded: Any) -> bool:
    """Whether values are equal; numbers within 1e-9, because exp and log may differ in their last bit between
    languages.
    """
    if isinstance(found, dict) and isinstance(recorded, dict):
        return found.keys() == recorded.keys() and all(same(found[key], recorded[key]) for key in found)
    if isinstance(found, list | tuple) and isinstance(recorded, list | tuple):
        return len(found) == len(recorded) and all(map(same, found, recorded))
    if isinstance(found, bool) or isinstance(recorded, bool) or not isinstance(found, int | float):
        return type(found) is type(recorded) and bool(found == recorded)
    return isinstance(recorded, int | float) and abs(found - recorded) <= 1e-9 * max(1.0, abs(found))
