"""Routing between device and cloud: the decision, and the client that calls either. docs/routing.md is the
guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nearfar.routing.decision import decide
from nearfar.routing.policy import Policy
from nearfar.routing.types import CloudState, Conversation, DeviceState, Reason, RouteDecision, RouteRequest

if TYPE_CHECKING:
    from nearfar.routing.client import AsyncHybridClient as AsyncHybridClient
    from nearfar.routing.client import HybridClient as HybridClient
    from nearfar.routing.endpoint import Endpoint as Endpoint

__all__ = [
    "AsyncHybridClient",
    "CloudState",
    "Conversation",
    "DeviceState",
    "Endpoint",
    "HybridClient",
    "Policy",
    "Reason",
    "RouteDecision",
    "RouteRequest",
    "decide",
]


def __getattr__(name: str) -> Any:
    """Import the client on first access: the decision needs neither httpx nor an engine."""
    if name not in ("AsyncHybridClient", "Endpoint", "HybridClient"):
        raise AttributeError(f"module 'nearfar.routing' has no attribute {name!r}")
    try:
        from nearfar.routing import client
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the hybrid client needs {error.name}: pip install 'nearfar[routing]'", name=error.name
        ) from error
    return getattr(client, name)
