"""Inputs and output of the decision. The names are those of the shared JSON vectors and of TypeScript."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nearfar.remote.breaker import BreakerState as BreakerState

Side = Literal["device", "cloud"]
Mode = Literal["device_only", "prefer_device", "auto", "prefer_cloud", "cloud_only"]
Unit = Literal["tokens", "money"]
PrivateBy = Literal["request", "earlier", "quote"]
"""Why a request is private: it says so ("request"), it carries an earlier private text ("earlier"), or it
quotes one.
"""
Feature = Literal["tools", "json_schema", "json_object", "grammar", "images", "logprobs", "reasoning"]

MODES: tuple[Mode, ...] = ("device_only", "prefer_device", "auto", "prefer_cloud", "cloud_only")
FEATURES: tuple[Feature, ...] = (
    "tools",
    "json_schema",
    "json_object",
    "grammar",
    "images",
    "logprobs",
    "reasoning",
)


@dataclass(frozen=True)
class Conversation:
    """A conversation's last side, its tokens in each side's cache, and its cost so far."""

    last_route: Side | None = None
    cached_device: int = 0
    cached_cloud: int = 0
    spent: float = 0


@dataclass(frozen=True)
class RouteRequest:
    """A request as the decision sees it: counts, no text.

    `max_tokens` bounds the answer, `expected_tokens` is its likely length. `difficulty` is in [0, 1], None
    where it was not scored. `quotes_private`: the request is private because it quotes a private text.
    """

    prompt_tokens: int
    max_tokens: int
    expected_tokens: int | None = None
    features: tuple[Feature, ...] = ()
    difficulty: float | None = None
    mode: Mode | None = None
    private: bool = False
    quotes_private: bool = False
    conversation: Conversation = Conversation()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> RouteRequest:
        """Parse the JSON form."""
        conversation = Conversation(**data.get("conversation") or {})
        return cls(**{**data, "features": tuple(data.get("features", ())), "conversation": conversation})


@dataclass(frozen=True)
class DeviceState:
    """The device's present state. `context`, `free_kv_tokens`: tokens; speeds: tokens per second; `battery`:
    charge in [0, 1].

    `here`: the device is proven to compute on this machine, else `why` names what is missing; a server that
    forwards requests does not compute.
    """

    available: bool = True
    why: str | None = None
    context: int = 0
    free_kv_tokens: int = 0
    features: tuple[Feature, ...] = ()
    prefill_tps: float | None = None
    decode_tps: float | None = None
    queue_seconds: float = 0
    battery: float | None = None
    charging: bool | None = None
    power_saver: bool | None = None
    here: bool = True

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> DeviceState:
        """Parse the JSON form."""
        return cls(**{**data, "features": tuple(data.get("features", ()))})


@dataclass(frozen=True)
class CloudState:
    """The cloud's present state. `retry_after`, `round_trip`, `queue_seconds`: seconds; prices: per million
    tokens.

    `round_trip` is the time to the first token without prefill.
    """

    available: bool = True
    why: str | None = None
    breaker: BreakerState = "closed"
    retry_after: float = 0
    context: int | None = None
    features: tuple[Feature, ...] = ()
    round_trip: float | None = None
    queue_seconds: float = 0
    prefill_tps: float | None = None
    decode_tps: float | None = None
    metered: bool | None = None
    price_in: float = 0
    price_out: float = 0

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> CloudState:
        """Parse the JSON form."""
        return cls(**{**data, "features": tuple(data.get("features", ()))})


@dataclass(frozen=True)
class Reason:
    """One reason: docs/routing.md lists the codes. `value` is the measured value, `limit` the limit it was
    compared with.
    """

    code: str
    side: Side | None = None
    value: float | str | None = None
    limit: float | str | None = None


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds to the first token and to the last; None where a speed is unknown."""

    ttft: float
    total: float | None = None


@dataclass(frozen=True)
class Predictions:
    """Predictions for each side; None where unknown."""

    device: Prediction | None = None
    cloud: Prediction | None = None


@dataclass(frozen=True)
class RouteDecision:
    """Where a request goes, and where it goes if that fails. `route` None: nowhere, and `reasons` say why.

    `degraded`: the device answers though the cloud was wanted. `cost`: the most that the cloud may charge for
    the request, in the policy's unit.
    """

    route: Side | None
    fallback: Side | None = None
    degraded: bool = False
    reasons: tuple[Reason, ...] = ()
    predicted: Predictions = field(default_factory=Predictions)
    cost: float = 0

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form, as in the vectors."""
        return {**asdict(self), "reasons": [asdict(reason) for reason in self.reasons]}
