"""Reads the battery, where the platform reports it."""

from __future__ import annotations

import time
from dataclasses import dataclass

FRESH_SECONDS = 30.0
"""Seconds for which a reading is used: a battery changes slowly, and reading takes system calls."""


@dataclass(frozen=True)
class Power:
    """The state of the battery. `battery`: charge in [0, 1]. None: no battery, or unknown."""

    battery: float | None = None
    charging: bool | None = None


_last: tuple[float, Power] | None = None


def power() -> Power:
    """Return the reading from psutil, if it is installed."""
    global _last
    now = time.monotonic()
    if _last is None or now - _last[0] > FRESH_SECONDS:
        _last = now, _ask()
    return _last[1]


def _ask() -> Power:
    try:
        import psutil

        found = psutil.sensors_battery()
    # the library is not installed, the platform is not supported, or permission is missing
    except (ImportError, AttributeError, OSError):
        return Power()
    return Power() if found is None else Power(found.percent / 100.0, bool(found.power_plugged))
