"""Settings of the engines on Ray. The command line takes its defaults from here; nothing here imports Ray."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.errors import RequestError


@dataclass(frozen=True)
class RayOptions:
    """How many replicas run, where, and how requests are spread. Times are in seconds.

    `address`: the cluster's address (`auto`: the one this machine belongs to); None starts a Ray on this
    machine. `cpus`, `gpus`: resources that Ray reserves for a replica. `target`: requests under way per
    replica that the autoscaler aims at; `max_ongoing`: the most that a replica takes. `slack`: how many more
    requests a replica may have and still be preferred for a prompt whose beginning it knows. `attempts`:
    replicas that are tried for one request.
    """

    address: str | None = None
    app: str = "nearfar"
    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    target: float = 16.0
    max_ongoing: int = 128
    max_waiting: int = 1024
    slack: int = 4
    attempts: int = 4
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    health_seconds: float = 5.0
    health_timeout: float = 15.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise RequestError(
                f"replicas must be MIN:MAX with 1 <= MIN <= MAX, not {self.min_replicas}:{self.max_replicas}",
                "replicas",
            )


def parse_replicas(text: str) -> tuple[int, int]:
    """Parse MIN:MAX, or one number for both. Raises RequestError for other texts."""
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise RequestError(f"replicas must be a number or MIN:MAX, not {text!r}", "replicas") from None
