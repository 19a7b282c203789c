"""Routes whose bodies are read as strict and bounded JSON, and whose answers name the ignored fields."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from nearfar.fallback_server.http import convert, errors
from nearfar.fallback_server.http.ignoring import HEADER, Ignored, IgnoredFieldLog, ignored, passes_on
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.fallback_server.http.passing import Forwarder


class JsonRoute(APIRoute):
    """A route whose body is read as strict JSON. `teller` logs ignored fields; None rejects unknown fields.
    `passes_on`: unknown fields are for the engine's servers.
    """

    max_depth = ServerLimits.json_depth
    teller: IgnoredFieldLog | None = None
    passes_on = False
    passing: Forwarder | None = None
    """Forwards requests of paths that an upstream lists."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        handle = super().get_route_handler()
        model: Any = self.body_field.field_info.annotation if self.body_field is not None else None

        async def strict(request: Request) -> Response:
            made = convert.JsonRequest(request.scope, request.receive)
            made.max_depth, made.model = self.max_depth, model
            passing = passes_on.set(self.passes_on)
            try:
                return await told(made)
            finally:
                passes_on.reset(passing)

        async def handled(made: convert.JsonRequest) -> Response:
            found = None if self.passing is None else await self.passing.forwarded(made)
            return await handle(made) if found is None else found

        async def told(made: convert.JsonRequest) -> Response:
            if self.teller is None:
                return await handled(made)
            found = Ignored()
            token = ignored.set(found)
            try:
                response = await handle(made)
            finally:
                ignored.reset(token)
            if found.names:
                response.headers[HEADER] = found.header
                self.teller.tell(found, made.headers.get("user-agent", ""))
            return response

        return strict


def json_router(
    prefix: str, max_depth: int, strict_fields: bool, passes_on: bool, passing: Forwarder | None = None
) -> APIRouter:
    """Make a router whose routes ignore unknown fields, unless these are rejected (`strict_fields`) or passed
    on to the engine's servers (`passes_on`). `passing` forwards requests that a server answers as they are.
    """
    teller = None if strict_fields or passes_on else IgnoredFieldLog()
    settings = {"max_depth": max_depth, "teller": teller, "passes_on": passes_on, "passing": passing}
    route = type("LimitedJsonRoute", (JsonRoute,), settings)
    return APIRouter(prefix=prefix, route_class=route, responses=errors.DESCRIBED)
