"""The policy: settings that an application's owner chooses once. Their defaults are defined only here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from nearfar.errors import RequestError
from nearfar.remote.breaker import BreakerOptions as BreakerOptions
from nearfar.routing.types import MODES, Mode, Side, Unit
from nearfar.suggestions import advised

Group = TypeVar("Group")

_ONE_OF: dict[str, tuple[str | None, ...]] = {
    "mode": MODES, "budget_unit": ("tokens", "money"), "escalation": ("off", "continue", "restart"),
    "after_cut": ("device", "cloud"), "shadow": (None, "device", "cloud"),
}  # fmt: skip
RECORD: Literal["record"] = "record"
"""The router that decides nothing, and has the client record what a router would look at."""
_LEAST = {"window": 1, "period": 1, "failures": 1, "default_max_tokens": 1, "logprob": -math.inf}
"""The least value of a policy's numbers; 0 for numbers that are not listed."""


class _Options:
    """Options that reject senseless values, however they are made."""

    def __post_init__(self) -> None:
        _check(self)


def _check(options: object) -> None:
    for each in fields(options):  # type: ignore[arg-type]
        value = getattr(options, each.name)
        if is_dataclass(each.default):
            group = type(each.default)
            if not isinstance(value, group):
                raise RequestError(
                    f"{each.name} must be {group.__name__}(…), not {value!r:.80}; Policy.parse takes JSON",
                    each.name,
                )
            _check(value)
        elif wrong := _wrong(each.name, str(each.type), value):
            raise RequestError(f"{each.name} must be {wrong}, not {value!r}", each.name)


def _wrong(name: str, kind: str, value: object) -> str | None:
    """Describe the values that a field allows; None if this value is allowed."""
    if name == "router":
        allowed = isinstance(value, Mapping | Path | str | None)
        return None if allowed else f"a file, the JSON of a router, {RECORD!r} or None"
    if name in _ONE_OF:
        return None if value in _ONE_OF[name] else f"one of {', '.join(str(each) for each in _ONE_OF[name])}"
    kinds = kind.split(" | ")
    if value is None and "None" in kinds:
        return None
    if kinds[0] == "bool":
        return None if isinstance(value, bool) else "true or false"
    if kinds[0] not in ("int", "float"):
        return None
    whole = kinds[0] == "int"
    if (
        isinstance(value, bool)
        or not isinstance(value, int if whole else int | float)
        or not math.isfinite(value)
    ):
        return "a whole number" if whole else "a number"
    if name in ("difficulty_threshold", "battery_floor", "target_share"):
        return None if 0 <= value <= 1 else "from 0 to 1"
    least = _LEAST.get(name, 0)
    return None if value >= least else f"at least {least}"


def _parsed(group: type[Group], data: object, where: str) -> Group:
    if not isinstance(data, Mapping):
        raise RequestError(f"{where} must be an object, not {data!r}", where)
    known = {each.name for each in fields(group)}  # type: ignore[arg-type]
    if unknown := sorted(str(name) for name in set(data) - known):
        raise RequestError(f"{where} has no field {', '.join(unknown)}{advised(unknown, known)}", unknown[0])
    return group(**data)


@dataclass(frozen=True)
class RetryOptions(_Options):
    """How a failed call to the cloud is retried before any of its answer was shown. Times are in seconds.

    A request is retried at most `attempts` times. Attempt n waits the time of Retry-After and a random part
    of min(`cap`, `base`·2ⁿ); if the wait exceeds `max_wait`, there is no retry. All requests share a budget:
    it holds at most `burst` retries, and each request adds `ratio` of one, so that retries stay under that
    share of the traffic. Where the device can answer, it does so after `before_fallback` retries.
    """

    attempts: int = 2
    base: float = 0.25
    cap: float = 4.0
    max_wait: float = 5.0
    ratio: float = 0.1
    before_fallback: int = 0
    burst: float = 5.0


@dataclass(frozen=True)
class MonitorOptions(_Options):
    """When a device's answer counts as going wrong; docs/routing.md defines each figure. None: not watched.

    Means are over the last `window` tokens, from the `min_tokens`-th on. `logprob`: natural logarithm,
    `entropy`: nats. `repeats`: how often a run of up to `period` tokens must repeat, over at least
    `min_repeat` tokens.
    """

    window: int = 16
    min_tokens: int = 8
    logprob: float | None = None
    entropy: float | None = None
    repeats: int | None = 4
    period: int = 16
    min_repeat: int = 24


@dataclass(frozen=True)
class CalibrationOptions(_Options):
    """How fast the difficulty threshold follows. Step n moves it by at most max(`floor`, `rate`/√n)."""

    rate: float = 0.1
    floor: float = 0.002


@dataclass(frozen=True)
class Timeouts(_Options):
    """Seconds to wait: for the cloud's connection, first token and next token, and for the device's first and
    next token.

    The device's first token may take long, because kernels may have to be compiled.
    """

    connect: float = 5.0
    first_token: float = 30.0
    between: float = 30.0
    device_first_token: float = 120.0
    device_between: float = 30.0


@dataclass(frozen=True)
class Policy(_Options):
    """The policy of a hybrid client. Times are in seconds; docs/routing.md explains every field.

    `difficulty_threshold`: prompts at least this difficult go to the cloud. `ttft`, `completion`: objectives
    for the first and the last token. `battery_floor`: below this charge, unplugged, work goes to the cloud.
    Budgets are in `budget_unit`; `spent_day` is the day's cost so far. `sticky_seconds`: a re-prefill longer
    than this keeps a conversation where it is.

    `target_share`: the target share of requests to the cloud, which the threshold follows.
    `default_max_tokens`: limit of a request without one. `escalation`: the action when the monitor finds an
    answer going wrong. `hold_tokens`: tokens of a device's answer that are held back at its beginning, while
    it can be restarted unseen. `after_cut`: the side that continues when the cloud's stream is cut.
    `hedge_seconds`: start the other side too when no token came by then. `shadow`: decide and record, but
    answer from this side where the request's own mode allows it. `record_text`: decision records may contain
    the texts. `router`: a fitted router, its file or its JSON; or "record", which decides as without one and
    records what it would look at.
    """

    mode: Mode = "auto"
    difficulty_threshold: float = 0.5
    ttft: float | None = 2.0
    completion: float | None = None
    battery_floor: float = 0.2
    budget_conversation: float | None = None
    budget_day: float | None = None
    budget_unit: Unit = "tokens"
    spent_day: float = 0
    sticky_seconds: float = 1.0
    target_share: float | None = None
    default_max_tokens: int = 512
    escalation: Literal["off", "continue", "restart"] = "restart"
    hold_tokens: int = 0
    after_cut: Side = "device"
    hedge_seconds: float | None = None
    shadow: Side | None = None
    record_text: bool = False
    router: Mapping[str, Any] | Path | str | None = None
    monitor: MonitorOptions = MonitorOptions()
    breaker: BreakerOptions = BreakerOptions()
    device_breaker: BreakerOptions = BreakerOptions(failures=2, seconds=30.0)
    retry: RetryOptions = RetryOptions()
    calibration: CalibrationOptions = CalibrationOptions()
    timeouts: Timeouts = Timeouts()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Policy:
        """Parse the JSON form. Raises RequestError for unknown names."""
        groups: dict[str, type] = {
            "monitor": MonitorOptions, "breaker": BreakerOptions, "device_breaker": BreakerOptions,
            "retry": RetryOptions, "calibration": CalibrationOptions, "timeouts": Timeouts,
        }  # fmt: skip
        given = dict(data) if isinstance(data, Mapping) else data
        if isinstance(given, dict):
            given |= {
                name: _parsed(group, given[name], name) for name, group in groups.items() if name in given
            }
        return _parsed(cls, given, "the policy")
