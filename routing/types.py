"""What the decision is made from, and what it is. The names are those of the shared JSON vectors and of
TypeScript.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nearfar.remote.breaker import BreakerState as BreakerState

Side = Literal["device", "cloud"]
Mode = Literal["device_only", "prefer_device", "auto", "prefer_cloud", "cloud_only"]
Unit = Literal["tokens", "money"]
PrivateBy = Literal["request", "earlier", "quote"]
"""What makes a request private: it says so, it carries a text of an earlier one that did, or quotes one."""
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
    """Where a conversation was answered last, what each side has of it in its cache (tokens), and what it
    has cost.
    """

    last_route: Side | None = None
    cached_device: int = 0
    cached_cloud: int = 0
    spent: float = 0


@dataclass(frozen=True)
class Request:
    """A request as the decision sees it: counts, no text.

    `max_tokens` bounds the answer, `expected_tokens` is its likely length. `difficulty` is 0..1, None where
    nobody scored it. `quotes_private`: it is private because it quotes a private text.
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
    def parse(cls, data: Mapping[str, Any]) -> Request:
        """From its JSON form."""
        conversation = Conversation(**data.get("conversation") or {})
        return cls(**{**data, "features": tuple(data.get("features", ())), "conversation": conversation})


@dataclass(frozen=True)
class DeviceState:
    """The device now. `context`, `free_kv_tokens`: tokens; speeds: tokens a second; `battery`: 0..1.

    `here`: it computes on this machine, as far as it proves, else `why` says what is missing; a server that
    hands requests on does not.
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
        """From its JSON form."""
        return cls(**{**data, "features": tuple(data.get("features", ()))})


@dataclass(frozen=True)
class CloudState:
    """The cloud now. `retry_after`, `round_trip`, `queue_seconds`: seconds; prices: per million tokens.

    `round_trip` is the time to the first token of a prompt that costs nothing.
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
        """From its JSON form."""
        return cls(**{**data, "features": tuple(data.get("features", ()))})


@dataclass(frozen=True)
class Reason:
    """One reason: docs/routing.md lists the codes. `value` is what was found, `limit` what it was held
    against.
    """

    code: str
    side: Side | None = None
    value: float | str | None = None
    limit: float | str | None = None


@dataclass(frozen=True)
class Prediction:
    """Seconds to the first token and to the last; None where a speed is not known yet."""

    ttft: float
    total: float | None = None


@dataclass(frozen=True)
class Predictions:
    """What is predicted for each side."""

    device: Prediction | None = None
    cloud: Prediction | None = None


@dataclass(frozen=True)
class Decision:
    """Where a request goes, and where it goes if that fails. `route` None: nowhere, and `reasons` say why.

    `degraded`: the device answers, though the cloud was wanted. `cost`: the most that the cloud may charge
    for the request, in the policy's unit.
    """

    route: Side | None
    fallback: Side | None = None
    degraded: bool = False
    reasons: tuple[Reason, ...] = ()
    predicted: Predictions = field(default_factory=Predictions)
    cost: float = 0

    def as_json(self) -> dict[str, Any]:
        """As in the vectors."""
        return {**asdict(self), "reasons": [asdict(reason) for reason in self.reasons]}
