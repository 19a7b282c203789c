"""The model name `auto`, which stands for one of two upstream models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nearfar.fallback_server.engines.base import EngineRequest

AUTO = "auto"
"""The name that clients use."""


@dataclass(frozen=True)
class Standing:
    """What is known of a model when a request comes. `up`: one of its servers answers, and the request's
    tenant may use it. `context`: tokens; 0 where no server tells it.
    """

    up: bool
    context: int = 0


@dataclass(frozen=True)
class AutoModels:
    """Two models and what chooses between them: `choose` gets the request, the estimated tokens of its prompt
    and how both models stand, and says whether the large one answers, or None where neither can.
    """

    small: str
    large: str
    choose: Callable[[EngineRequest, int, Standing, Standing], bool | None]

    @property
    def models(self) -> tuple[str, str]:
        """Both models, the small one first."""
        return self.small, self.large
