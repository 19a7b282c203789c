"""Settings of the bench. The command line takes its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nearfar.errors import RequestError

Mode = Literal["closed", "open", "both"]
Api = Literal["completions", "chat"]


@dataclass(frozen=True)
class Slo:
    """Bounds that a request must keep to count for goodput, in seconds. `tpot` is the mean time between
    tokens.
    """

    ttft: float = 1.0
    tpot: float = 0.1


@dataclass(frozen=True)
class Workload:
    """The requests to send. Lengths are in tokens.

    With `trace`, the file gives lengths (multiplied by `scale`), arrivals and shared beginnings. Without,
    lengths are drawn from lognormal distributions with the means `prompt_tokens` and `output_tokens` and the
    sigma `spread`, arrivals from a Poisson process. `shared_prefix`: tokens that all prompts begin with, in
    addition. None for `max_prompt` or `max_output` means the model's context.
    """

    trace: Path | None = None
    scale: float = 1.0
    prompt_tokens: int = 128
    output_tokens: int = 64
    spread: float = 0.5
    shared_prefix: int = 0
    max_prompt: int | None = None
    max_output: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "max_prompt", "max_output"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} must be at least 1, not {value}", name)
        if not 0 < self.scale < float("inf"):
            raise RequestError(f"scale must be a number above 0, not {self.scale}", "scale")
        if self.spread < 0 or self.shared_prefix < 0:
            raise RequestError("spread and shared_prefix must not be negative", "spread")


@dataclass(frozen=True)
class BenchOptions:
    """Settings of a run. `requests`: requests per level; None means four times its concurrency, at least 32.
    Times are in seconds.

    `rates` are mean requests per second of open loops; without any, the trace's own rate is used.
    `level_seconds`: no request of a level begins later than this. `ignore_eos` requests answers of full
    length; it is turned off where the server rejects the field.
    """

    mode: Mode = "closed"
    concurrency: tuple[int, ...] = (1, 4, 16, 32, 64)
    rates: tuple[float, ...] = ()
    requests: int | None = None
    level_seconds: float = 60.0
    timeout: float = 120.0
    api: Api = "completions"
    model: str | None = None
    key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    slo: Slo = field(default_factory=Slo)
    work: Workload = field(default_factory=Workload)

    def __post_init__(self) -> None:
        if self.mode not in ("closed", "open", "both"):
            raise RequestError(f"mode must be closed, open or both, not {self.mode!r}", "mode")
        if self.api not in ("completions", "chat"):
            raise RequestError(f"api must be completions or chat, not {self.api!r}", "api")
        if any(count < 1 for count in self.concurrency):
            raise RequestError(f"concurrency must be at least 1, not {min(self.concurrency)}", "concurrency")
        if any(not 0 < rate < float("inf") for rate in self.rates):
            raise RequestError(f"a rate must be a number above 0, not {self.rates}", "rate")
        if self.requests is not None and self.requests < 1:
            raise RequestError(f"requests must be at least 1, not {self.requests}", "requests")

    def count(self, concurrency: int) -> int:
        """Requests of a level of a closed loop at this concurrency."""
        return self.requests or max(32, 4 * concurrency)
