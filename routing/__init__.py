"""Device or cloud: the decision, and the client that calls either. docs/routing.md is the guide."""

from nearfar.routing.decision import decide
from nearfar.routing.policy import Policy
from nearfar.routing.types import CloudState, Conversation, Decision, DeviceState, Reason, Request

__all__ = ["CloudState", "Conversation", "Decision", "DeviceState", "Policy", "Reason", "Request", "decide"]
