"""What the owner of an application decides once: the policy. Defaults live here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from nearfar.errors import RequestError
from nearfar.remote.breaker import BreakerOptions as BreakerOptions
from nearfar.routing.types import MODES, Mode, Side, Unit


@dataclass(frozen=True)
class RetryOptions:
    """How a failed call to the cloud is tried again, before anything of its answer was shown. Times are seconds.

    At most `attempts` times a request. Attempt n waits a random part of min(`cap`, `base`·2ⁿ) after what Retry-After asks for;
    a wait beyond `max_wait` is not worth it. All requests share a budget: it holds at most `burst` retries, and each request
    adds `ratio` of one, so that retries stay under that share of the traffic. Where the device can answer it does after
    `before_fallback` retries.
    """

    attempts: int = 2
    base: float = 0.25
    cap: float = 4.0
    max_wait: float = 5.0
    ratio: float = 0.1
    before_fallback: int = 0
    burst: float = 5.0


@dataclass(frozen=True)
class MonitorOptions:
    """When a device's answer is taken to go wrong: docs/routing.md says how each figure is made. None: not watched.

    Means are over the last `window` tokens, from the `min_tokens`-th on. `logprob`: natural logarithms, `entropy`: nats.
    `repeats`: how often a run of up to `period` tokens must come in a row, in at least `min_repeat` tokens.
    """

    window: int = 16
    min_tokens: int = 8
    logprob: float | None = None
    entropy: float | None = None
    repeats: int | None = 4
    period: int = 16
    min_repeat: int = 24


@dataclass(frozen=True)
class CalibrationOptions:
    """How fast the difficulty threshold follows. Step n moves by at most max(`floor`, `rate`/√n)."""

    rate: float = 0.1
    floor: float = 0.002


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait for the cloud: for a connection, the first token, the next token; and for the device's next token."""

    connect: float = 5.0
    first_token: float = 30.0
    between: float = 30.0
    device_between: float = 30.0


_ONE_OF: dict[str, tuple[str | None, ...]] = {
    "mode": MODES, "budget_unit": ("tokens", "money"), "escalation": ("off", "continue", "restart"),
    "after_cut": ("device", "cloud"), "shadow": (None, "device", "cloud"),
}  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """The policy of a hybrid client. Times are seconds; docs/routing.md explains every field.

    `difficulty_threshold`: prompts at least this difficult go to the cloud. `ttft`, `completion`: objectives for the first and
    the last token. `battery_floor`: below this charge, unplugged, work goes to the cloud. Budgets are in `budget_unit`;
    `spent_day` is what the day has cost already. `sticky_seconds`: a re-prefill longer than this keeps a conversation where it is.

    `target_share`: the share of requests that shall go to the cloud; the threshold follows it. `default_max_tokens`: of a
    request without a limit. `escalation`: what happens when the monitor finds an answer going wrong. `hold_tokens`: tokens of
    a device's answer that are held back at its beginning, while it can be restarted unseen. `after_cut`: who goes on when the
    cloud's stream is cut. `hedge_seconds`: start the other side too when no token came by then. `shadow`: decide and
    record, but answer from this side where the request's own mode allows it. `record_text`: decision records may have the texts.
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
    escalation: Literal["off", "continue", "restart"] = "off"
    hold_tokens: int = 0
    after_cut: Side = "device"
    hedge_seconds: float | None = None
    shadow: Side | None = None
    record_text: bool = False
    monitor: MonitorOptions = MonitorOptions()
    breaker: BreakerOptions = BreakerOptions()
    device_breaker: BreakerOptions = BreakerOptions(failures=2, seconds=30.0)
    retry: RetryOptions = RetryOptions()
    calibration: CalibrationOptions = CalibrationOptions()
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        for name, allowed in _ONE_OF.items():
            if getattr(self, name) not in allowed:
                shown = ", ".join(str(value) for value in allowed)
                raise RequestError(f"{name} must be one of {shown}, not {getattr(self, name)!r}", name)
        for name in ("difficulty_threshold", "battery_floor", "target_share"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise RequestError(f"{name} must be from 0 to 1, not {value!r}", name)
        for name in ("ttft", "completion", "budget_conversation", "budget_day", "sticky_seconds", "hold_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise RequestError(f"{name} must not be negative, not {value!r}", name)
        if self.hedge_seconds is not None and self.escalation != "off":
            raise RequestError("hedge_seconds and escalation exclude each other: set one of them", "hedge_seconds")

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Policy:
        """From its JSON form; refuses names that nobody knows."""
        unknown = sorted(set(data) - {field.name for field in fields(cls)})
        if unknown:
            raise RequestError(f"the policy has no field {', '.join(unknown)}", unknown[0])
        groups: dict[str, Any] = {
            "monitor": MonitorOptions, "breaker": BreakerOptions, "device_breaker": BreakerOptions,
            "retry": RetryOptions, "calibration": CalibrationOptions, "timeouts": Timeouts,
        }  # fmt: skip
        return cls(**{name: groups[name](**value) if name in groups else value for name, value in data.items()})
