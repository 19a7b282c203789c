"""Recent speed of each side: exponentially weighted means of measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

WEIGHT = 0.3
"""Weight of a new measurement."""
MIN_PREFILL = 16
"""Least tokens of a measured prefill: a shorter one measures launches, not the device."""
MIN_DECODE = 4


@dataclass
class Speeds:
    """Tokens per second, and seconds to the first token without prefill (`round_trip`). None: not measured
    yet.
    """

    prefill_tps: float | None = None
    decode_tps: float | None = None
    round_trip: float | None = None

    def prefill(self, tokens: int, seconds: float) -> None:
        """Note that a prompt of `tokens` uncached tokens took `seconds`."""
        if tokens >= MIN_PREFILL and seconds > 0:
            self.prefill_tps = _mean(self.prefill_tps, tokens / seconds)

    def decode(self, tokens: int, seconds: float) -> None:
        """Note that `tokens` tokens came in `seconds`, counted from the token before them."""
        if tokens >= MIN_DECODE and seconds > 0:
            self.decode_tps = _mean(self.decode_tps, tokens / seconds)

    def first_token(self, seconds: float, uncached_tokens: int) -> None:
        """Note that the first token came after `seconds`. The known time of prefill is subtracted from the
        round trip.
        """
        prefill = uncached_tokens / self.prefill_tps if self.prefill_tps else 0.0
        self.round_trip = _mean(self.round_trip, max(seconds - prefill, 0.0))

    def as_json(self) -> dict[str, Any]:
        """Return the state to keep between starts."""
        return asdict(self)

    @classmethod
    def restored(cls, data: Mapping[str, Any]) -> Speeds:
        """Restore from a kept state."""
        return cls(**{name: data.get(name) for name in ("prefill_tps", "decode_tps", "round_trip")})


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
