"""The battery, where the platform tells."""

from __future__ import annotations

import time
from dataclasses import dataclass

FRESH_SECONDS = 30.0
"""A battery does not change faster than that, and asking takes system calls."""


@dataclass(frozen=True)
class Power:
    """`battery`: 0..1. None: there is none, or nobody knows."""

    battery: float | None = None
    charging: bool | None = None


_last: tuple[float, Power] | None = None


def power() -> Power:
    """What psutil says, where it is installed."""
    global _last
    now = time.monotonic()
    if _last is None or now - _last[0] > FRESH_SECONDS:
        _last = now, _ask()
    return _last[1]


def _ask() -> Power:
    try:
        import psutil

        found = psutil.sensors_battery()
    except (ImportError, AttributeError, OSError):  # not installed; not on this platform; no permission
        return Power()
    return Power() if found is None else Power(found.percent / 100.0, bool(found.power_plugged))
