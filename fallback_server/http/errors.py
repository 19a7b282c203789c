"""Errors as clients expect them: the HTTP status, and the shape of the requested API.

OpenAI's shape has message, type, param and code; Anthropic's (below /v1/messages) a type from its own list;
Ollama's (below /api) a single text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteException

from nearfar.errors import CONTEXT_CODE, EngineError, NearfarError, OverloadError, RequestError
from nearfar.fallback_server.http.fields import models_at
from nearfar.fallback_server.http.words import IDLE, words_of_all
from nearfar.remote.errors import RefusedError
from nearfar.suggestions import advised, suggested

log = logging.getLogger(__name__)

_UNREAD = (408, 413, 431)
"""Statuses after which the rest of the request's body may still come; nobody reads it."""
DESCRIBED: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request was refused; the message says why."},
    "5XX": {"description": "The server or an upstream failed, or is not ready."},
}
"""The errors of every path, as the OpenAPI description lists them."""
OLLAMA = "/api/"
"""Prefix of the paths of Ollama's API."""
MESSAGES = "/v1/messages"
"""Prefix of the paths of Anthropic's API."""
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
        return f"prompt is too long: {self.message}" if self.code == CONTEXT_CODE else self.message

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
        self.problem = Problem(status, message, param, code, retry_after)


def problem_of(error: Exception) -> Problem:
    """Convert an exception for the client. For a bug it says only that there is one."""
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
        return problem_of(error).response(request.url.path)

    async def plain(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteException)
        text = str(error.detail)
        # Starlette raises this for a path that no route has
        if error.status_code == 404 and text == "Not Found":
            text = _no_path(request.url.path)
        if error.status_code == 405:
            ways = (error.headers or {}).get("Allow", "another method")
            text = f"{request.url.path[:80]} takes {ways}, not {request.method}"
        problem = Problem(error.status_code, text, None, _CODES.get(error.status_code))
        response = problem.response(request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        errors = error.errors()
        if any(tuple(each["loc"]) == ("body",) and each["type"] in _NO_OBJECT for each in errors):
            problem = _no_object(request.headers.get("content-type"), error.body)
            return problem.response(request.url.path)
        return validation(errors, _fields(request)).response(request.url.path)

    app.add_exception_handler(NearfarError, known)
    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(StarletteException, plain)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, known)


_NO_OBJECT = ("missing", "dict_type", "model_type", "model_attributes_type")


def _no_object(content_type: str | None, body: object) -> Problem:
    """Describe a body that could not be read as a JSON object at all."""
    is_what = "is empty" if body is None else f"is {_kind(body)}, not a JSON object"
    said = "none" if content_type is None else ascii(content_type[:80])
    text = (
        f"the body {is_what}: send an object with the fields of the request"
        if content_type is not None and "json" in content_type.lower()
        else f"the body is read as JSON only where the header Content-Type says so, and it is {said}: send "
        "Content-Type: application/json (curl -H 'Content-Type: application/json')"
    )
    return Problem(400, text, None, "invalid_request")


PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/v1/decisions", "/v1/score", "/v1/models", "/v1/tokenize", "/v1/detokenize", "/v1/rerank",
)  # fmt: skip
"""Known paths, to suggest one for an unknown path. (The app knows its own only with its schema.)"""


def _no_path(asked: str) -> str:
    """The message for an unknown path, with the closest known path, or else all of them."""
    *others, last = PATHS
    there = f": this server speaks {', '.join(others)} and {last}"
    path = asked if asked.startswith("/v1/") else f"/v1{asked}"
    return f"there is no {asked[:80]} here{suggested(path, PATHS) or there}"


def _fields(request: Request) -> Iterable[str]:
    """Names of the body's fields that the route of a request takes."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return getattr(model, "model_fields", ())


_CODES = {404: "not_found", 405: "method_not_allowed"}


def validation(errors: Sequence[Mapping[str, Any]], fields: Iterable[str] = ()) -> Problem:
    """Describe validation errors, with place and value. Of a union's errors it shows our own, else the most
    deeply nested one. `fields`: the known fields, to suggest one for an unknown field.
    """
    error = max(errors, key=lambda e: (e["type"] == "value_error", len(e["loc"])))
    unknown = error["type"] == "extra_forbidden"
    # An unknown field may have the name of a type: it is the last part of its place.
    *within, last = error["loc"] or ("body",)
    of_role = [at for at, part in enumerate(within) if part == "user" and isinstance(within[at - 1], int)]
    place = [str(part) for at, part in enumerate(within) if not _is_type_name(part) and at not in of_role]
    place += [str(last)] if unknown or not _is_type_name(last) else []
    value = error.get("input")
    # the error is about the field that says which member of a union a value is
    if error["type"].startswith("union_tag_"):
        place.append(error["ctx"]["discriminator"].strip("'()"))
        value = error["ctx"].get("tag")
    where, message = ".".join(place), words_of_all(_alternatives(errors, error))
    if unknown:
        meant = _meant(place, fields)
        name = where if where and where.isprintable() else ascii(where)
        return Problem(400, f"unknown field {name:.80}{meant}", place[0], "invalid_request")
    given = "" if isinstance(value, dict | list) and _kind(value) in message else _not(error["type"], value)
    text = f"{where}: {message}{given}" if where else message
    # An error that concerns several fields has no place, but may name one of them.
    param = place[0] if place else error.get("ctx", {}).get("param")
    return Problem(400, text, param, "invalid_request")


def _alternatives(errors: Sequence[Mapping[str, Any]], error: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The errors about the same place that list a union's other types; else the error alone."""
    *within, last = error["loc"] or ("body",)
    if not _is_type_name(last):
        return [error]
    return [each for each in errors if list(each["loc"][:-1]) == within and _is_type_name(each["loc"][-1])]


def _meant(place: Sequence[str], fields: Iterable[str]) -> str:
    """The end of a message about an unknown field: the field of the same object that may be meant."""
    *within, last = place
    if not within:
        return advised([last], fields)
    inside = ".".join(part for part in within if not part.isdecimal()) + "."
    known = {field.alias or name for model in models_at(inside) for name, field in model.model_fields.items()}
    return advised([last], known)


def _not(kind: str, value: Any) -> str:
    """The end of a message: the given value, where showing it helps."""
    if kind in _WITHOUT_VALUE:
        return ""
    if isinstance(value, dict | list):
        return "" if kind in _OF_CONTAINERS else f", not {_kind(value)}"
    return f", not {(value[:80] if isinstance(value, str) else value)!a:.80}"


def _is_type_name(part: str | int) -> bool:
    """Whether a part of a place names a member of a union (or "body"), not a field."""
    return isinstance(part, str) and (part in _TYPE_NAMES or "[" in part)


def _kind(value: object) -> str:
    """JSON's name for a value's type, or the value itself where it is short."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"{value!a:.80}"


_OF_CONTAINERS = ("value_error", "too_short", "too_long")
"""Errors about the contents of a list or an object that has the right type."""
_WITHOUT_VALUE = ("missing", "union_tag_not_found", IDLE)
_TYPE_NAMES = {"body", "str", "int", "float", "bool", "system", "assistant", "tool", "other", "NamedTool"}
