"""How long the fuzz tests look: NEARFAR_FUZZ times what `make test` does (see `make fuzz`)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def effort(examples: int = 100) -> settings:
    """Hypothesis settings: `examples` in `make test`, NEARFAR_FUZZ times as many in `make fuzz`; the same
    ones each time in the first.
    """
    times = int(os.environ.get("NEARFAR_FUZZ", "1"))
    return settings(
        max_examples=examples * times,
        deadline=None,
        derandomize=times == 1,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
