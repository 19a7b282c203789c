"""Routes whose bodies are read as strict and bounded JSON, and whose answers name the ignored fields."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from nearfar.fallback_server.http import convert, errors
from nearfar.fallback_server.http.address import check_address
from nearfar.fallback_server.http.ignoring import (
    HEADER,
    Ignored,
    IgnoredFieldLog,
    computes,
    ignored,
    passes_on,
)
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.fallback_server.http.passing import Forwarder


class JsonRoute(APIRoute):
    """A route whose body is read as strict JSON, and whose answer names the ignored fields in a header.

    `teller` logs ignored fields. `strict`: unknown fields are rejected. `passes_on`: an upstream gets the
    requests of this route as they were received. `computes`: this server computes the answers. `passing`
    forwards requests of paths that an upstream lists.
    """

    max_depth = ServerLimits.json_depth
    teller = IgnoredFieldLog()
    strict = False
    passes_on = False
    computes = True
    passing: Forwarder | None = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        handle = super().get_route_handler()
        model: Any = self.body_field.field_info.annotation if self.body_field is not None else None
        parameters = [field.alias for field in self.dependant.query_params]
        checked = self.strict and self.passing is not None and model is not None
        check = partial(_check, TypeAdapter(model)) if checked else None

        async def read(request: Request) -> Response:
            made = convert.JsonRequest(request.scope, request.receive)
            made.max_depth, made.model = self.max_depth, model
            found = made.state.ignored = Ignored()
            tokens = passes_on.set(self.passes_on), ignored.set(None if self.strict else found)
            here = computes.set(self.computes)
            try:
                response = await handled(made)
            finally:
                passes_on.reset(tokens[0])
                ignored.reset(tokens[1])
                computes.reset(here)
            if found.header:
                response.headers[HEADER] = found.header
                self.teller.tell(found, made.headers.get("user-agent", ""))
            return response

        async def handled(made: convert.JsonRequest) -> Response:
            found = None if self.passing is None else await self.passing.forwarded(made, check)
            if found is not None:
                return found
            check_address(made, parameters)
            return await handle(made)

        return read


def _check(model: TypeAdapter[Any], body: Any) -> None:
    """Raise RequestValidationError where a body does not fit a model. Values that only an upstream can follow
    are accepted.
    """
    token = passes_on.set(True)
    try:
        model.validate_python(body)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found, body=body) from error
    finally:
        passes_on.reset(token)


def json_router(
    prefix: str,
    max_depth: int,
    strict: bool,
    computes: bool,
    *,
    passes_on: bool = False,
    passing: Forwarder | None = None,
) -> APIRouter:
    """Make a router whose routes ignore unknown fields, reject them (`strict`), or leave them to an upstream
    (`passes_on`). `computes`: this server computes the answers. `passing` forwards requests that a server
    answers as they are.
    """
    settings = {
        "max_depth": max_depth, "teller": IgnoredFieldLog(), "strict": strict, "passes_on": passes_on,
        "computes": computes, "passing": passing,
    }  # fmt: skip
    route = type("LimitedJsonRoute", (JsonRoute,), settings)
    return APIRouter(prefix=prefix, route_class=route, responses=errors.DESCRIBED)
