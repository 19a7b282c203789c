"""The effort of the fuzz tests: NEARFAR_FUZZ times that of `make test` (see `make fuzz`)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def effort(examples: int = 100) -> settings:
    """Hypothesis settings: `examples` in `make test`, the same ones each time; NEARFAR_FUZZ times as many in
    `make fuzz`.
    """
    times = int(os.environ.get("NEARFAR_FUZZ", "1"))
    return settings(
        max_examples=examples * times,
        deadline=None,
        derandomize=times == 1,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
