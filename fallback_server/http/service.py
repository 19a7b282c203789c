"""The objects that all calls share, and the models that a request may name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request
from starlette.types import Scope

from nearfar.errors import EngineError
from nearfar.fallback_server.engines.base import EngineRequest, ModelInfo, ServerEngine, TokenUsage
from nearfar.fallback_server.http.errors import GONE, ApiError
from nearfar.fallback_server.http.limits import Admission, AdmittedRequest
from nearfar.fallback_server.http.logs import AuditEntry, AuditLog
from nearfar.fallback_server.http.metrics import Metrics
from nearfar.fallback_server.http.times import CallTimes
from nearfar.fallback_server.http.tracing import Tracer
from nearfar.fallback_server.tenants import ANONYMOUS, Tenant

CHOSEN = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
    "/v1/messages/count_tokens", "/api/chat", "/api/generate",
)  # fmt: skip
"""Paths whose requests may name `auto`: a model is chosen by what they ask."""


class LiveCall(Protocol):
    """A call under way, as administrators see and end it."""

    @property
    def name(self) -> str:
        """The id of the answer."""
        ...

    @property
    def request(self) -> Request:
        """The HTTP request."""
        ...

    @property
    def wanted(self) -> EngineRequest:
        """The request as engines see it."""
        ...

    @property
    def times(self) -> CallTimes:
        """The times of the steps from queue to end."""
        ...

    @property
    def usage(self) -> TokenUsage:
        """The tokens counted so far."""
        ...

    async def cancel(self) -> None:
        """End the call. The client gets the answer so far."""
        ...


@dataclass
class Service:
    """The objects that all calls share."""

    engine: ServerEngine
    admission: Admission
    metrics: Metrics
    tracer: Tracer
    audit: AuditLog | None = None
    draining: bool = False
    live: dict[str, LiveCall] = field(default_factory=dict)
    names_keys: Callable[[], bool] = lambda: True
    """Whether metrics have the names of keys; otherwise all keys count as "". Metrics that everybody may read
    name none.
    """

    def turned_away(self, scope: Scope, status: int) -> None:
        """Count and log a request that was rejected before it was a call."""
        state = scope["state"]
        self.metrics.unanswered(outcome_of(status))
        if self.audit is not None:
            entry = AuditEntry(
                state["request_id"],
                state["tenant"].name,
                scope["path"],
                "",
                status,
                outcome_of(status),
                0,
                0,
                0.0,
            )
            self.audit.write(entry)

    def visible(self, tenant: Tenant) -> list[ModelInfo]:
        """Return the models that a tenant may use; a name that stands for several needs one of these."""
        return _allowed(self.engine.models(), tenant)

    def _usable(self, tenant: Tenant) -> list[ModelInfo]:
        """Return the models that a tenant may use. Raises EngineError where there is no model at all yet: no
        upstream has listed one.
        """
        if not (found := self.engine.models()):
            raise EngineError("the server has no model yet; try again later")
        return _allowed(found, tenant)

    def model(self, name: str, tenant: Tenant) -> ModelInfo:
        """Return a model that a tenant may use. Raises ApiError with 404 for any other model, and EngineError
        while there is none at all.
        """
        visible = self._usable(tenant)
        found = next((info for info in visible if info.id == name), None)
        if found is None:
            known = ", ".join(info.id for info in visible) or "none for this key"
            raise ApiError(
                404, f"there is no model {name!r:.100}; there are {known}", "model", "model_not_found"
            )  # fmt: skip
        return found

    def requested(self, wanted: EngineRequest) -> ModelInfo:
        """Return the requested model. Raises an error for a model that does not exist or is not for this key
        (which looks the same), or for more urgency than the key may request.
        """
        tenant = wanted.tenant
        found = self.model(wanted.model, tenant)
        if wanted.priority < tenant.priority:
            raise ApiError(
                403,
                f"priority must be at least {tenant.priority} with this key, not {wanted.priority}; smaller "
                "is more urgent",
                "priority",
                "priority",
            )
        return found

    def check_single(self, info: ModelInfo, path: str, tenant: Tenant) -> None:
        """Raise ApiError where a path needs one model and the name stands for several."""
        if not info.stands_for or path in CHOSEN:
            return
        models = ", ".join(model for model in info.stands_for if tenant.allows(model))
        raise ApiError(
            400,
            f"{info.id!r} is chosen for chats and completions only; for {path} name one of these models: "
            f"{models}",
            "model",
            "model_not_single",
        )

    def named(self, model: str | None, tenant: Tenant) -> str:
        """Return the requested model; for a request without one, the only model that its tenant may use.
        Names of an engine that computes here are names of one model. Raises ApiError where several models
        may be meant, and EngineError while there is no model at all, whatever the request names.
        """
        there = [info.id for info in self._usable(tenant)]
        if model:
            return model
        if len(there) == 1 or (there and not self.engine.passes_on):
            return there[0]
        known = ", ".join(there) or "none for this key"
        raise ApiError(400, f"the field model is missing, and this server has {known}: name one", "model")


def _allowed(models: Iterable[ModelInfo], tenant: Tenant) -> list[ModelInfo]:
    """Return the models that a tenant may use, of which a name that stands for several needs one."""
    return [
        info
        for info in models
        if tenant.allows(info.id) and any(map(tenant.allows, info.stands_for or (info.id,)))
    ]


def tenant_of(request: Request) -> Tenant:
    """The tenant of an HTTP request."""
    tenant = getattr(request.state, "tenant", ANONYMOUS)
    assert isinstance(tenant, Tenant)
    return tenant


def ticket_of(request: Request) -> AdmittedRequest:
    """The ticket with which the request was admitted."""
    ticket = request.state.ticket
    assert isinstance(ticket, AdmittedRequest)
    return ticket


def outcome_of(status: int) -> str:
    """The outcome of a request that ended with an error, in metrics and logs."""
    if status == GONE:
        return "aborted"
    if status == 429:
        return "limited"
    return "refused" if status < 500 else "failed"
