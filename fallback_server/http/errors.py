"""Errors as clients expect them: the HTTP status, and the shape of the requested API.

OpenAI's shape has message, type, param and code; Anthropic's (below /v1/messages) a type from its own list;
Ollama's (below /api) a single text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteException

from nearfar.errors import CONTEXT_CODE, EngineError, NearfarError, OverloadError, RequestError
from nearfar.fallback_server.http.faults import fault_of
from nearfar.fallback_server.http.names import in_own_words
from nearfar.fallback_server.http.paths import MESSAGES, OLLAMA, no_path
from nearfar.fallback_server.http.words import printable
from nearfar.remote.errors import RefusedError

log = logging.getLogger(__name__)

_UNREAD = (408, 413, 431)
"""Statuses after which the rest of the request's body may still come; nobody reads it."""
DESCRIBED: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request was refused; the message says why."},
    "5XX": {"description": "The server or an upstream failed, or is not ready."},
}
"""The errors of every path, as the OpenAPI description lists them."""
GONE = 499
"""Status of a request that was ended before its answer was complete, by its client or by an administrator."""
LONG = "prompt is too long"
"""The words by which Anthropic's clients know that a prompt does not fit."""
JSON = "application/json"
"""The content type of a body."""
_CODES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed"}
"""OpenAI's code of an error that has none of its own, by status."""
_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Problem:
    """An error to send to a client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    kind: str | None = None
    """OpenAI's type of the error; by default that of the status."""

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {
            "error": {
                "message": self.message,
                "type": self.kind or kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def told(self, path: str = "") -> dict[str, Any]:
        """Return the error in the shape of the API that `path` belongs to."""
        if path.startswith(OLLAMA):
            return {"error": self.message}
        if path.startswith(MESSAGES):
            return {"type": "error", "error": {"type": self._anthropic, "message": self._words}}
        return self.body

    @property
    def _anthropic(self) -> str:
        """Anthropic's error type for the status."""
        return _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    @property
    def _words(self) -> str:
        """The message for Anthropic's clients, which compact a conversation when it begins with these
        words.
        """
        if self.code != CONTEXT_CODE or self.message.startswith(LONG):  # an upstream has written it so
            return self.message
        said, _, advice = self.message.partition(f": the {LONG}, ")
        return f"{LONG}: {said}; {advice}" if advice else f"{LONG}: {self.message}"

    def response(self, path: str = "") -> JSONResponse:
        """Return an HTTP response in the shape of the API that `path` belongs to."""
        headers = (
            {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        )
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in _UNREAD:
            headers["Connection"] = "close"
        return JSONResponse(self.told(path), self.status, headers)


class ApiError(HTTPException):
    """An error of a request that does not reach an engine."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(status, message)
        self.problem = Problem(status, message, param, code or _CODES.get(status), retry_after)


def problem_of(error: Exception, request: Request | None = None) -> Problem:
    """Convert an exception for the client: an error names the fields of its request. For a bug it says only
    that there is one.
    """
    problem = _problem_of(error)
    if problem.param is None or request is None:
        return problem
    message, param = in_own_words(request, problem.message, problem.param)
    return replace(problem, message=message, param=param)


def _problem_of(error: Exception) -> Problem:
    match error:
        case ApiError():
            return error.problem
        case OverloadError():
            return Problem(429, str(error), None, "overloaded", error.retry_after)
        case RefusedError():  # an upstream's, unchanged
            return Problem(error.status, str(error), error.param, error.code, kind=error.kind)
        case RequestError():
            return Problem(400, str(error), error.param, error.code)
        case EngineError():
            return Problem(503, str(error), None, "engine_error", 1.0)
        case NearfarError():
            return Problem(500, str(error), None, "engine_error")
        case _:
            log.error("a request failed: %s", error, exc_info=error)
            return Problem(500, "the server has a fault; its log says more", None, "internal_error")


def install(app: FastAPI) -> None:
    """Make the app answer every error in the requested API's shape."""

    async def known(request: Request, error: Exception) -> Response:
        return problem_of(error, request).response(_api_of(request))

    async def plain(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteException)
        text = str(error.detail)
        # Starlette raises this for a path that no route has
        if error.status_code == 404 and text == "Not Found":
            text = no_path(request.url.path)
        if error.status_code == 405:
            ways = (error.headers or {}).get("Allow", "another method")
            text = f"{request.url.path[:80]} takes {ways}, not {request.method}"
        problem = Problem(error.status_code, text, None, _CODES.get(error.status_code))
        response = problem.response(_api_of(request))
        response.headers.update(error.headers or {})
        return response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        errors = error.errors()
        if any(tuple(each["loc"]) == ("body",) and each["type"] in _NO_OBJECT for each in errors):
            problem = no_object("is empty", request.headers.get("content-type")).problem
            return problem.response(request.url.path)
        return validation(errors, _model(request)).response(request.url.path)

    app.add_exception_handler(NearfarError, known)
    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(StarletteException, plain)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, known)


_NO_OBJECT = ("missing", "dict_type", "model_type", "model_attributes_type")


def no_object(is_what: str, content_type: str | None) -> ApiError:
    """Return the error for a body that is not a JSON object. `is_what`: what the body is instead."""
    said = "none" if content_type is None else f"'{printable(content_type[:80])}'"
    text = (
        f"the body {is_what}: send an object with the fields of the request"
        if content_type is not None and "json" in content_type.lower()
        else f"the body is read as JSON only where the header Content-Type says so, and it is {said}: send "
        f"Content-Type: {JSON} (curl -H 'Content-Type: {JSON}')"
    )
    return ApiError(400, text)


def speaks_anthropic(request: Request) -> bool:
    """Whether the client is one of Anthropic's. OpenAI's API has a path of the same name for models."""
    return "anthropic-version" in request.headers


def _api_of(request: Request) -> str:
    """Return a path of the API in whose shape the client reads errors."""
    path = request.url.path
    return MESSAGES if path.startswith("/v1/models") and speaks_anthropic(request) else path


def _model(request: Request) -> type[BaseModel] | None:
    """The model of the body that the route of a request takes."""
    body = getattr(request.scope.get("route"), "body_field", None)
    return getattr(getattr(body, "field_info", None), "annotation", None)


def validation(errors: Sequence[Mapping[str, Any]], model: type[BaseModel] | None) -> Problem:
    """Describe the errors of a request that does not fit its model."""
    fault = fault_of(errors, model)
    return Problem(400, fault.message, fault.param, "invalid_request")
